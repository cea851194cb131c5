"""The drafter's tensors by name and shape, and the folders of safetensors in which models are published.

Owns what a drafter's weights must be, and the reading and writing of one file or several with an index. Knows no
config layout. Reads no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open

from draftmill.checkpoint.durable import read_json, write_json, write_tensors
from draftmill.checkpoint.store import Tensors
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter, by upstream name: eleven a layer and three."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {
        f"layers.{index}.{name}.weight": size for index in range(shape.num_layers) for name, size in layer.items()
    }
    return {
        **shapes,
        "fc.weight": (hidden, shape.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


def check_tensors(tensors: Tensors, shape: DrafterShape, where: str) -> None:
    """Raise InputError unless the tensors are a drafter's of this shape: none missing, none too many, sizes right."""
    wanted = tensor_shapes(shape)
    if missing := [name for name in wanted if name not in tensors]:
        raise InputError(f"{where} lacks {_some(missing)}; these are not the weights of such a drafter")
    if unknown := [name for name in tensors if name not in wanted]:
        raise InputError(f"{where} has {_some(unknown)}, which a DFlash drafter does not have; it can't be used as one")
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise InputError(
                f"{where}: {name} is of shape {tuple(tensors[name].shape)}; by the configuration it is {size}"
            )


def write_weights(folder: Path, tensors: Tensors, dtype: torch.dtype, max_file_bytes: int) -> list[str]:
    """Write tensors as model.safetensors, or as several files and an index where they exceed `max_file_bytes`.

    Each tensor is rounded to `dtype` when its file is written. Returns the names of the files. Raises OSError.
    """
    sketch = {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in tensors.items()}
    plan = split_torch_state_dict_into_shards(sketch, max_shard_size=max_file_bytes)
    for file, names in plan.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name].detach().to(dtype) for name in names})
    files = list(plan.filename_to_tensors)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX_FILE, index)
        files.append(INDEX_FILE)
    return files


def read_weights(folder: Path, skip: frozenset[str] = frozenset()) -> Tensors:
    """Read the tensors of a published folder, in the dtype they are in, but those named in `skip`.

    Raises InputError that names the file: none there, a pickle, one of several missing, or damaged.
    """
    return {name: tensor for file in _weight_files(folder) for name, tensor in _read_file(file, skip)}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        index = read_json(folder / INDEX_FILE)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{folder / INDEX_FILE} has no weight_map; it is not an index of safetensors files")
        names = list(dict.fromkeys(weight_map.values()))
        if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise InputError(f"{folder / INDEX_FILE} names {bad[0]!r}, which is not a file beside it")
        if absent := [name for name in names if not (folder / name).exists()]:
            raise InputError(f"{folder / absent[0]} is missing; the index beside it names it")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    if pickles:
        raise InputError(f"{folder} holds its weights as a pickle ({pickles[0]}), which is never read; convert it")
    raise InputError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_file(path: Path, skip: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name not in skip:
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} can't be read: {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
