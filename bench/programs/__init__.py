"""Programs that benchmarks start as their users do, each in processes of its own."""
