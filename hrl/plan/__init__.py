"""What a step would cost on other hardware, and which layout is best: a model of cost, and a search over layouts."""
