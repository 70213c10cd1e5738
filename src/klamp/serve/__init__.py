"""An OpenAI endpoint for a model: continuous batching over transformers' own cache, FastAPI in front of it.

``engine`` decodes, ``continuous_batch`` is what it decodes with, ``openai_requests`` and ``openai_answers`` speak
OpenAI's language, ``app`` is the web application and the thread it runs in, ``saved_models`` finds the weights that a
name stands for.
"""
