"""Jobs for the tests of ``targets.compile_many``."""

import os

import jax
import jax.numpy as jnp


def doubles(donated=True):
    return (lambda x: x * 2), (jax.ShapeDtypeStruct((8, 128), jnp.float32),), (0,) if donated else ()


def raises():
    raise RuntimeError("no such thing")


def dies():
    os._exit(3)
