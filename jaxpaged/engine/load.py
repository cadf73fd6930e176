"""From an opened checkpoint to a split model on the device."""

import jax
import jax.numpy as jnp

from jaxpaged.model.llama import SplitModel, split_model
from jaxpaged.param_names import layer_params
from jaxpaged.weights.checkpoint import Checkpoint


def load_model(checkpoint: Checkpoint, dtype: str, *, scan_layers: bool, progress: bool = False) -> SplitModel:
    """Loads and splits a model.

    Args:
        checkpoint: opened.
        dtype: of the parameters.
        scan_layers: stack the layers' parameters, one layer at a time into donated buffers, so that no second copy of the
            weights ever exists on the device.
        progress: show a progress bar.
    """
    config = checkpoint.config
    if not scan_layers:
        return split_model(config, checkpoint.load_params(dtype, progress=progress))
    put = jax.jit(lambda stack, value, i: jax.lax.dynamic_update_index_in_dim(stack, value, i, 0), donate_argnums=0)
    params: dict[str, jax.Array] = {
        f"layers/{name}": jnp.zeros((config.num_layers, *shape), dtype) for name, shape in layer_params(config).items()
    }
    for path, array in checkpoint.iter_params(dtype):
        if path.startswith("layers/"):
            _, index, name = path.split("/")
            params[f"layers/{name}"] = put(params[f"layers/{name}"], array, int(index))
        else:
            params[path] = jax.device_put(array)
    return split_model(config, params, scan_layers=True)
