"""Small models and tokenizers with known behaviour, shared by all tests."""
