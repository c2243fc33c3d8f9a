"""Architectures as plain modules with canonical names; weights in and out of Hugging Face's layout."""
