"""The inference engine; the only package that imports torch, deepspeed or transformers."""
