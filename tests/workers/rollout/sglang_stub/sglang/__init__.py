"""Stands for SGLang in tests: the part of its engine that hrl calls, over a transformers model."""
