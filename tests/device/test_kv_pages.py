"""The model's view of the pool: formats and the pages that kernels can address."""

from jaxpaged.model.kv_pages import addressable_pages, pool_spec
from jaxpaged.model_config import ModelConfig

LLAMA_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192)


def test_fp8_is_e4m3_and_half_of_bfloat16() -> None:
    wide = pool_spec(LLAMA_8B, num_pages=10, page_size=16, dtype="bfloat16")
    narrow = pool_spec(LLAMA_8B, num_pages=10, page_size=16, dtype="fp8")
    assert narrow.dtype == "float8_e4m3fn"
    assert wide.bytes_per_token == 131072 == 2 * narrow.bytes_per_token


def test_an_8_bit_pool_is_cut_before_the_backends_offsets_wrap() -> None:
    per_page = 32 * 16 * 2 * 8 * 128  # elements: layers, tokens, K and V of every head
    hazardous = pool_spec(LLAMA_8B, num_pages=2**31 // per_page + 100, page_size=16, dtype="int8")
    pages = addressable_pages(hazardous, "triton")
    assert pages == 2**31 // per_page
    assert addressable_pages(pool_spec(LLAMA_8B, num_pages=pages, page_size=16, dtype="int8"), "triton") == pages
    assert addressable_pages(hazardous, "mosaic_tpu") == hazardous.num_pages
    beyond = pool_spec(LLAMA_8B, num_pages=2**32 // per_page + 1, page_size=16, dtype="int8")
    assert addressable_pages(beyond, "triton") == beyond.num_pages
