"""The library's README example and the example scripts do what they say."""

import importlib.util
import pathlib
import re

import jax
import numpy as np

import pallas_kernels

ROOT = pathlib.Path(pallas_kernels.__file__).parent.parent


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_example_runs(capsys):
    """The first Python block of the README is 15 lines of code or fewer, runs as it stands and prints the shape it promises."""
    text = (ROOT / "pallas_kernels" / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block
    code = block.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    exec(compile(code, "README.md", "exec"), {})
    assert "(8, 8, 64)" in capsys.readouterr().out


def test_every_public_name_is_in_the_readme():
    text = (ROOT / "pallas_kernels" / "README.md").read_text()
    missing = [n for n in pallas_kernels.__all__ if f"`{n}" not in text]
    assert not missing


def test_decode_loop_equals_recomputing_everything():
    """The example's tokens are those of dense attention over the whole sequence, recomputed for every token."""
    example = load_example("decode_loop")
    prompts = [[1, 2, 3], list(range(20)), [7]]
    got = example.main(prompts, new_tokens=15)
    params = jax.tree.map(np.asarray, example.random_model())
    for prompt, tokens in zip(prompts, got, strict=True):
        sequence = list(prompt)
        for token in tokens:
            x = params["embed"][sequence]
            q = (x[-1] @ params["wq"]).reshape(example.NUM_HEADS, -1)
            kv = (x @ params["wkv"]).reshape(len(sequence), 2, example.KV_HEADS, -1)
            k, v = (np.repeat(kv[:, i], example.NUM_HEADS // example.KV_HEADS, axis=1) for i in (0, 1))
            scores = np.exp(np.einsum("nh,snh->ns", q, k) * example.HEAD_DIM**-0.5)
            weights = scores / scores.sum(-1, keepdims=True)
            logits = np.einsum("ns,snh->nh", weights, v).reshape(-1) @ params["wo"] @ params["head"]
            assert token == int(np.argmax(logits))
            sequence.append(token)


def test_cascade_example_reads_less_and_gives_the_same():
    result = load_example("cascade").main()
    assert result["largest difference"] < 1e-6
    assert result["bytes read one by one"] / result["bytes read by cascade"] > 7
