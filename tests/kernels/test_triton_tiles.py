"""Launch settings of the GPU kernels and the tuning files that change them."""

import json

import pytest

import pallas_kernels as pk
from pallas_kernels.paged_attention import triton_tiles
from pallas_kernels.paged_attention.triton_tiles import TritonTiles, default_tiles, device_slug, tiles_for, tuning_key

FORMATS = [pk.PoolSpec(1, 9, 16, 2, h, d) for h in (32, 64, 80, 128, 192, 256) for d in ("float32", "bfloat16", "int8")]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("spec", FORMATS, ids=tuning_key)
def test_defaults_fit_shared_memory(spec, capability):
    """K and V tiles of all stages and the queries fit what one program may use: 163 KB on A100, 227 KB later."""
    tiles = default_tiles(spec, capability)
    dim = triton_tiles.next_power_of_2(spec.head_dim)
    limit = 163 * 1024 if capability < (9, 0) else 227 * 1024
    decode = 2 * tiles.decode_tokens * dim * spec.itemsize * tiles.decode_stages
    ragged = 2 * tiles.ragged_tokens * dim * spec.itemsize * tiles.ragged_stages + tiles.ragged_rows * dim * max(
        2, spec.itemsize
    )
    assert max(decode, ragged) <= limit


def test_tuned_settings_replace_defaults(tmp_path, monkeypatch):
    spec = pk.PoolSpec(4, 99, 16, 8, 128)
    monkeypatch.setattr(triton_tiles, "TUNING_DIR", tmp_path)
    file = tmp_path / "nvidia_h100_80gb_hbm3.json"
    file.write_text(json.dumps({"tiles": {tuning_key(spec): {"decode_tokens": 128, "decode_warps": 8}}}))
    tuned = tiles_for(spec, "NVIDIA H100 80GB HBM3")
    assert (tuned.decode_tokens, tuned.decode_warps) == (128, 8)
    assert tuned.ragged_tokens == default_tiles(spec).ragged_tokens
    assert tiles_for(pk.PoolSpec(4, 99, 32, 8, 128), "NVIDIA H100 80GB HBM3") == default_tiles(spec)
    assert tiles_for(spec, "NVIDIA H200") == default_tiles(spec)


def test_tuning_file_with_an_unknown_field_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_tiles, "TUNING_DIR", tmp_path)
    (tmp_path / "some_gpu.json").write_text(json.dumps({"tiles": {"bfloat16/h128/p16": {"decode_token": 128}}}))
    with pytest.raises(ValueError, match=r"decode_token.*decode_tokens"):
        tiles_for(pk.PoolSpec(4, 99, 16, 8, 128), "Some GPU")


def test_settings_do_not_depend_on_the_batch():
    """Neither the number of pages nor of layers changes them, so a row's result cannot depend on its neighbours."""
    a, b = pk.PoolSpec(1, 9, 16, 2, 64), pk.PoolSpec(32, 999, 16, 8, 64)
    assert tuning_key(a) == tuning_key(b)
    assert default_tiles(a) == default_tiles(b)


@pytest.mark.parametrize("change", [{"decode_tokens": 48}, {"ragged_rows": 0}, {"decode_warps": 3}])
def test_bad_settings(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TritonTiles(**change)


def test_shipped_tuning_files_load():
    for file in triton_tiles.TUNING_DIR.glob("*.json"):
        table = triton_tiles.load_table(file)
        assert all(TritonTiles(**values) for values in table.values())
        assert device_slug(json.loads(file.read_text())["device"]) == file.stem
