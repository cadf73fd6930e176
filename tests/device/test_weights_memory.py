"""Loading holds one parameter beside what is loaded: the host's peak stays near the size of the weights."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from jaxpaged.weights.checkpoint import open_checkpoint
from jaxpaged.weights.orbax_io import save_orbax
from tests.kit.gguf_files import write_gguf
from tests.kit.tiny import tiny_config, tiny_tensors, write_hf

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 12, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip

MEASURE = """
import json, sys
import jax, numpy as np
from jaxpaged.weights.checkpoint import open_checkpoint
jax.block_until_ready(jax.device_put(np.ones(8)) + 1)
checkpoint = open_checkpoint(sys.argv[1])
if sys.argv[3] == "orbax":
    import orbax.checkpoint

def peak():  # this program's own high-water mark; ru_maxrss would start at that of the process which forked it
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

before = peak()
params = checkpoint.load_params(sys.argv[2])
print(json.dumps([peak() - before, sum(array.nbytes for array in params.values())]))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the high-water mark that Linux keeps")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("safetensors", "float32"), ("gguf", "float32"), ("gguf", "bfloat16"), ("orbax", "float32")]
)
def test_host_peak_is_at_most_1_3_times_the_weights(tmp_path, kind: str, dtype: str):
    """About 570 MB of weights in float32, 285 MB in bfloat16.

    Orbax keeps a cache of 100 MB and its threads' heaps, 150-190 MB in all, whatever the model's size: so twice the layers.
    """
    config = tiny_config(**SHAPE | {"num_hidden_layers": 24 if kind == "orbax" else 12})
    tensors = tiny_tensors(config | {"num_hidden_layers": 1})
    for name in [name for name in tensors if ".layers.0." in name]:  # every layer the same: quicker to make
        tensors |= {name.replace(".0.", f".{i}."): tensors[name] for i in range(1, config["num_hidden_layers"])}
    if kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", config, tensors, kind=gguf.GGMLQuantizationType.Q8_0)
    else:
        path = write_hf(tmp_path / "hf", config, tensors, dtype=dtype, num_shards=2)
    if kind == "orbax":
        path = save_orbax(open_checkpoint(str(path)), tmp_path / "converted")
    command = [sys.executable, "-c", MEASURE, str(path), dtype, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    growth, weights = json.loads(done.stdout)
    print(f"{kind} {dtype}: peak {growth / 2**20:.0f} MiB for {weights / 2**20:.0f} MiB of weights: {growth / weights:.2f}")
    assert weights > 250e6 and 0.9 * weights < growth <= 1.3 * weights
