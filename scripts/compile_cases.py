"""What ``compile_matrix.py`` compiles: builders that return ``(function, argument shapes, donated positions)``.

Everything is a shape; nothing is allocated. Builders run in the process that compiles (see ``pallas_kernels.targets.Job``).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

IMPLEMENTATION = {"gpu": "triton", "tpu": "mosaic_tpu"}
QUERY_TILE = {"gpu": 64, "tpu": 128}  # v4 has a sixteenth of the vector memory of v5e and takes 64
LAYERS, PAGES = 4, 2048


def shapes(tree):
    """A pytree of arrays as ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def pool_shapes(spec: pk.PoolSpec) -> pk.KVPool:
    """A pool of shapes."""
    scales = None if spec.scales_shape is None else jax.ShapeDtypeStruct(spec.scales_shape, jnp.float32)
    return pk.KVPool(jax.ShapeDtypeStruct(spec.data_shape, jnp.dtype(spec.dtype)), scales, spec)


def _spec(heads, dtype: str, page_size: int, quant: str | None) -> pk.PoolSpec:
    return pk.PoolSpec(LAYERS, PAGES, page_size, heads[1], heads[2], dtype, quant)


def _plan(platform: str, spec: pk.PoolSpec, rows: int, tokens: int | None, context: int, query_tile: int | None = None):
    pages = context // spec.page_size
    shape = pk.PlanShape(tokens or rows, rows, pages, decode_only=tokens is None)
    ones = np.ones(rows, np.int32)
    tables = np.arange(rows, dtype=np.int32)[:, None] + np.zeros((rows, pages), np.int32)  # each row writes its own page
    made = pk.plan(ones, ones, tables, spec=spec, target=platform, shape=shape, query_tile=query_tile or QUERY_TILE[platform])
    return shapes(made)


def attention(platform, heads, dtype, page_size, quant=None, rows=64, tokens=None, context=2048, window=None, query_tile=None):
    """``paged_attention`` with a traced layer: a decode step, or with ``tokens`` a mixed one."""
    spec = _spec(heads, dtype, page_size, quant)
    plan = _plan(platform, spec, rows, tokens, context, query_tile)
    q = jax.ShapeDtypeStruct((plan.shape.num_tokens, heads[0], heads[2]), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    one = jax.ShapeDtypeStruct((), jnp.float32) if quant == "tensor" else None

    def attend(q, pool, plan, layer, k_scale, v_scale):
        return pk.paged_attention(
            q,
            pool,
            plan,
            layer=layer,
            k_scale=k_scale,
            v_scale=v_scale,
            sliding_window=window,
            implementation=IMPLEMENTATION[platform],
        )

    return attend, (q, pool_shapes(spec), plan, jax.ShapeDtypeStruct((), jnp.int32), one, one), ()


def write(platform, heads, dtype, page_size, quant=None, rows=64, tokens=None, context=2048):
    """``write_kv`` into a donated pool."""
    spec = _spec(heads, dtype, page_size, quant)
    plan = _plan(platform, spec, rows, tokens, context)
    kv = jax.ShapeDtypeStruct((plan.shape.num_tokens, *heads[1:]), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    one = jax.ShapeDtypeStruct((), jnp.float32) if quant == "tensor" else None

    def put(pool, k, v, plan, layer, k_scale, v_scale):
        return pk.write_kv(
            pool, k, v, plan, layer=layer, k_scale=k_scale, v_scale=v_scale, implementation=IMPLEMENTATION[platform]
        )

    return put, (pool_shapes(spec), kv, kv, plan, jax.ShapeDtypeStruct((), jnp.int32), one, one), (0,)


def copy(platform, heads, dtype, page_size, quant=None, pages=16):
    """``copy_pages`` within a donated pool."""
    ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
    how = "xla" if platform == "gpu" else IMPLEMENTATION[platform]
    move = functools.partial(pk.copy_pages, implementation=how)
    return move, (pool_shapes(_spec(heads, dtype, page_size, quant)), ids, ids), (0,)


def swap(platform, heads, dtype, page_size, quant=None, pages=16):
    """``gather_pages``, then ``scatter_pages`` back into the donated pool."""
    ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
    how = "xla" if platform == "gpu" else IMPLEMENTATION[platform]

    def move(pool, out, back):
        return pk.scatter_pages(pool, back, pk.gather_pages(pool, out, implementation=how), implementation=how)

    return move, (pool_shapes(_spec(heads, dtype, page_size, quant)), ids, ids), (0,)


LLAMA = {
    "llama-3-8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32},
    "llama-3.2-3b": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_layers": 28,
        "num_heads": 24,
        "tie_word_embeddings": True,
    },
}


def execute_step(platform, model, page_size, context, rows=64, tokens=None):
    """A whole engine step of a real model in bfloat16: ``rows`` sequences of ``context`` tokens, the pool donated."""
    from jaxpaged.engine.buckets import BucketConfig, Buckets
    from jaxpaged.engine.input_builder import InputBuilder
    from jaxpaged.model.attention import AttentionBackend
    from jaxpaged.model.inputs import StepShape, pack
    from jaxpaged.model.kv_pages import pool_spec
    from jaxpaged.model.llama import split_model
    from jaxpaged.model.step import StepProgram, packed_step
    from jaxpaged.model_config import ModelConfig
    from jaxpaged.param_names import layer_params, model_params

    config = ModelConfig(**LLAMA[model], num_kv_heads=8, head_dim=128, max_position_embeddings=8192)
    params = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in model_params(config).items() if not n.startswith("layers/")}
    for name, shape in layer_params(config).items():
        params[f"layers/{name}"] = jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.bfloat16)
    split = split_model(config, params, scan_layers=True)
    pages = context // page_size
    spec = pool_spec(config, num_pages=rows * pages + 1, page_size=page_size, dtype="bfloat16")
    buckets = Buckets(BucketConfig(rows, tokens or 512, pages))
    builder = InputBuilder(buckets, spec, platform, query_tile=QUERY_TILE[platform])
    shape = StepShape(pk.PlanShape(tokens or rows, rows, pages, decode_only=tokens is None), rows)
    inputs = builder.empty(shape)
    program = StepProgram(split, AttentionBackend(IMPLEMENTATION[platform]))
    flat = pack(inputs)
    last = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return packed_step(program, shapes(inputs)), (split.leaves, pool_shapes(spec), last, shapes(flat)), (1, 2)
