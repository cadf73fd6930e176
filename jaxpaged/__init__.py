"""jaxpaged: PagedAttention inference for the Llama family in JAX and Pallas."""
