"""All that PyTorch calls private, or calls otherwise in one release than in another, under names of our own.

What has no public name may be gone with the next release, so no other file here uses such names: a new release of
PyTorch is tried, and mended, in this one. tests/test_torch_private.py holds that, and has the few which may stand
elsewhere. A name that is missing is missed where it is called, by an ImportError that says what to install; where one
can do without, the fall-back stands beside it.

PyTorch's compiler, a fifth of what starting a process costs, and DTensor are imported when they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# What is imported by its own name is so for others.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class _Missing:
    """In the place of a function that this PyTorch does not have."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ImportError(
            f"torch {torch.__version__} has no torch.{self._path}, which tensor3d needs. Install a version that the "
            "tests were run with: README.md, under Install, has them."
        )


def private(path: str) -> Any:
    """What torch has under a dotted name (`"_C._current_autograd_node"`), or what raises ImportError when called."""
    *places, name = path.split(".")
    found: Any = torch
    for number, place in enumerate(places, 1):
        inner = getattr(found, place, None)
        if inner is None:
            with suppress(ImportError):
                inner = import_module(".".join(("torch", *places[:number])))
        found = inner
    found = getattr(found, name, None)
    return _Missing(path) if found is None else found


def is_there(found: Any) -> bool:
    """Whether torch has what `private` was asked for."""
    return not isinstance(found, _Missing)


# --- Autograd ---------------------------------------------------------------------------------------------------------

backward_pass: Callable[[], int] = private("_C._current_graph_task_id")
"""The number of the backward pass that runs in this thread; -1: none does."""
current_node: Callable[[], Any] = private("_C._current_autograd_node")
"""The node of the graph that a backward pass computes now."""
will_execute: Callable[[Any], bool] = private("_C._will_engine_execute_node")
"""Whether the backward pass that runs computes this node; RuntimeError: it is what `torch.autograd.grad` asked for."""
next_sequence_nr: Callable[[], int] = private("autograd._get_sequence_nr")
"""The number that the next node will have."""

_top_saved_tensors_hooks: Callable[[bool], Any] = private("_C._autograd._top_saved_tensors_default_hooks")

under_transforms: Callable[[], bool] = private("_C._are_functorch_transforms_active")
"""Whether this runs within a transform of `torch.func`, such as `vmap`."""


def summed_by_ddp(inputs: Sequence[Any]) -> Tensor | None:
    """Of these, a parameter whose gradient the DistributedDataParallel waits for whose forward pass runs now, if one
    does."""
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if around is None:
        return None
    own = {id(parameter) for parameter in around._module_parameters}
    return next((each for each in inputs if id(each) in own and each.requires_grad), None)


def lent_by_fully_shard(parameters: Sequence[Tensor]) -> Tensor | None:
    """Of these, one that a `fully_shard` has gathered, and whose gradient it looks for within the backward pass.

    A look through all modules that are wrapped; where there are none, it costs nothing.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    wrapped = getattr(states, "_module_state_mapping", None)
    if not wrapped:
        return None
    by_id = {id(parameter): parameter for parameter in parameters}
    for state in [reference() for reference in list(wrapped.values())]:
        groups = getattr(state, "_fsdp_param_groups", None)  # where there are several, the one of torch 2.11 raises
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for each in [] if group is None else group.fsdp_params:
                if (found := by_id.get(id(getattr(each, "_unsharded_param", None)))) is not None:
                    return found
    return None


def saved_tensors_hooks_now() -> Any:
    """What `torch.autograd.graph.saved_tensors_hooks` was entered last, and not left: another object in each. A
    checkpoint enters them, where it runs first and where it runs again. None: none."""
    return _top_saved_tensors_hooks(False)


def sequence_nr(node: Any) -> int:
    """When a node was made, among others."""
    return int(node._sequence_nr())


def at_end_of_pass(action: Callable[[], None]) -> None:
    """Has the backward pass that runs now call it at its end."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def averaged_sizes(node: Any) -> Sequence[int]:
    """The shape that the node of a mean over everything has got."""
    return tuple(node._saved_self_sym_sizes)


def saved_reduction(node: Any) -> int | None:
    """How the node of a loss reduces it, as a number; None: it is not one of a loss."""
    found: int | None = getattr(node, "_saved_reduction", None)
    return found


def storage_id(tensor: Tensor | torch.UntypedStorage) -> int:
    """The same for all tensors in one storage, and another for every storage that is alive: fake ones too."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return int(storage._cdata)


def free_storage(tensor: Tensor) -> None:
    """Gives the memory of a tensor back, which others may still hold and nobody reads. An operator, so that whoever
    counts memory sees it."""
    resize_storage_(tensor, 0)


def has_storage(tensor: Tensor) -> bool:
    """False: `free_storage` has given its memory back."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


_storage_uses: Callable[[int], int] = private("_C._storage_Use_Count")


def storage_uses(tensor: Tensor) -> int:
    """How many tensors, this one included, lie in its storage, and what else holds it; one more where this looks."""
    return _storage_uses(tensor.untyped_storage()._cdata)


# --- Operators --------------------------------------------------------------------------------------------------------

amp_update_scale_: Callable[..., Any] = private("_amp_update_scale_")
fused_adamw_: Callable[..., Any] = private("_fused_adamw_")
fused_sgd_: Callable[..., Any] = private("_fused_sgd_")
resize_storage_: Callable[..., Any] = private("ops.inductor.resize_storage_bytes_")
softmax_backward: Callable[..., Tensor] = private("_softmax_backward_data")

# What SDPA itself calls on a CPU, where nothing is dropped; without them `tensor3d.attention.cpu` takes its other ways.
flash_attention_cpu: Any = private("ops.aten._scaled_dot_product_flash_attention_for_cpu")
flash_attention_cpu_backward: Any = private("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")

# PyTorch's own operator of FlashAttention on GPUs; without it "auto" takes another backend.
flash_attention: Any = private("ops.aten._flash_attention_forward")

# What SDPA calls there for fp32; `tools.bench operators` counts it.
efficient_attention: Any = private("ops.aten._scaled_dot_product_efficient_attention")

# The product of matrices in FP8, on GPUs; on CPUs only the tests call it.
scaled_mm: Callable[..., Tensor] = private("_scaled_mm")

# What torch.compile makes of a linear layer on a CPU; without it MKL multiplies.
onednn_linear: Any = private("ops.mkldnn._linear_pointwise")


def has_bf16_products() -> bool:
    """Whether oneDNN has products in bf16 on this processor; where it cannot be asked, they are taken in fp32."""
    asked = private("ops.mkldnn._is_mkldnn_bf16_supported")
    return is_there(asked) and bool(asked())


def is_fused_sgd(operator: Any) -> bool:
    """Whether what a dispatch mode was called for is `fused_sgd_`."""
    return operator is getattr(private("ops.aten._fused_sgd_"), "default", None)


def is_storage_resize(operator: Any) -> bool:
    """Whether it is that of `free_storage`."""
    return operator is getattr(resize_storage_, "default", None)


# --- Modules and modes ------------------------------------------------------------------------------------------------


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of that very kind and nobody waits for its calls, or has put another `forward` in place of
    its own: then it may be computed as part of something else."""
    if type(module) is not kind or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what is called."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


def modes_entered() -> int:
    """How many modes, of functions and of operators, this thread is in."""
    return int(private("_C._len_torch_function_stack")()) + int(private("_C._len_torch_dispatch_stack")())


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], ...]:
    """Where the hooks of steps lie, of this optimiser and of all."""
    everywhere = import_module("torch.optim.optimizer")
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        everywhere._global_optimizer_pre_hooks,
        everywhere._global_optimizer_post_hooks,
    )


# --- Compiler ---------------------------------------------------------------------------------------------------------


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Compiled code is to take any size of `dim`."""
    torch._dynamo.mark_dynamic(tensor, dim)


_set_way_of_code: Callable[[Any, Any], None] = private("_C._dynamo.eval_frame.set_code_exec_strategy")
_WayOfCode: Callable[[Any, Any], Any] = private("_C._dynamo.eval_frame._FrameExecStrategy")
_WAYS: Any = private("_C._dynamo.eval_frame._FrameAction")


def keep_out_of_graphs(function: Callable[..., Any], why: str) -> None:
    """`torch.compile` traces no such function, nor what it calls: it ends the graph there, or, where that must be
    whole, says why.

    `torch.compiler.disable` does so by a wrapper around it, which is called each time, and imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    if is_there(_set_way_of_code):
        _set_way_of_code(function.__code__, _WayOfCode(_WAYS.SKIP, _WAYS.SKIP))


def is_compiled_code(node: Any) -> bool:
    """Whether a node of a graph stands for all that `torch.compile` has made one function of."""
    return bool(node.name() == "CompiledFunctionBackward")


def import_compiler() -> None:
    """Imports what compiles, which is slow."""
    import_module("torch._inductor.compile_fx")


def compile_graph(graph: Any, examples: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Inductor as a backend of `torch.compile`: a function of the graph's inputs to all of its outputs."""
    made: Callable[..., Any] = import_module("torch._inductor").compile(graph, examples, options)
    return made


def compiled_code_folder() -> tuple[str, str]:
    """Where compiled code is kept and taken from, and where it would be if nobody had named a folder."""
    folders = import_module("torch._inductor.runtime.cache_dir_utils")
    return str(folders.cache_dir()), str(folders.default_cache_dir())


def has_cpp_compiler() -> bool:
    """Whether code for the CPU can be compiled."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def has_triton() -> bool:
    """Whether code for this GPU can be compiled."""
    return bool(private("utils._triton.has_triton")())


def compiling_often(most: int) -> AbstractContextManager[Any]:
    """Inside, `torch.compile` makes up to so many kinds of code of one function, and raises where there would be more.
    Else it makes 8, and runs the function as it is written from then on."""
    settings = import_module("torch._dynamo.config")
    found: AbstractContextManager[Any] = settings.patch(recompile_limit=most, fail_on_recompile_limit_hit=True)
    return found


def compiler_settings() -> list[Any]:
    """The modules that hold them, with `get_config_copy` and `load_config`."""
    return [import_module("torch._dynamo.config"), import_module("torch._inductor.config")]


def reset_compiler() -> None:
    """Drops what was compiled, and the counts."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


# --- Process groups ---------------------------------------------------------------------------------------------------

# torch 2.13 renamed these two (and warns about the old names); 2.11 and 2.12 know the old names alone.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_store() -> dist.Store:
    """Of the group of all ranks."""
    store: dist.Store = private("distributed.distributed_c10d._get_default_store")()
    return store


def default_group() -> dist.ProcessGroup:
    """The group of all ranks; ValueError: there is none."""
    group: dist.ProcessGroup = private("distributed.distributed_c10d._get_default_group")()
    return group


def group_table() -> dict[dist.ProcessGroup, Any]:
    """Every group of this process, with its backend and its store."""
    table: dict[dist.ProcessGroup, Any] = dist.distributed_c10d._world.pg_map
    return table


def resolve_group(name: str) -> dist.ProcessGroup:
    """The group that operators know by this name."""
    typed = getattr(dist.distributed_c10d, "GroupName", str)
    group: dist.ProcessGroup = private("distributed.distributed_c10d._resolve_process_group")(typed(name))
    return group


def symmetric_memory_operators() -> Any:
    """Those that take a collective and a product together, by the names that torch gives them."""
    import_module("torch.distributed._symmetric_memory")  # defines them
    return torch.ops.symm_mem


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Tells torch that a group will use it. Releases in which that is no longer needed mark the function as
    deprecated; it sends nothing."""
    enable = private("distributed._symmetric_memory.enable_symm_mem_for_group")
    if is_there(enable) and not hasattr(enable, "__deprecated__"):
        enable(group.group_name)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives wait; None: it does not tell, as under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    with suppress(RuntimeError, AttributeError):
        found: timedelta = max(group._get_backend(device).options._timeout for device in group._device_types)
        return found
    return None


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """They wait as long from now on, if its backend can be told, as NCCL and gloo can."""
    with suppress(RuntimeError):
        group.set_timeout(timeout)


def collectives_issued(group: dist.ProcessGroup) -> int:
    """How many collectives a group has seen."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def fake_collectives() -> ModuleType:
    """Tells fake tensors how collectives behave, once it is imported, and what each of them sends."""
    return import_module("torch.distributed._tools.fake_collectives")


def mesh_environment() -> Any:
    """Answers what DTensor asks of a mesh's devices (`num_devices_per_host`), which from torch 2.15 on it does before
    every operator that it plans: of "meta", which has none, it cannot."""
    return private("distributed.device_mesh._mesh_resources")


def fake_process_groups() -> ModuleType:
    """Registers the backend "fake", once it is imported, and has its store."""
    return import_module("torch.testing._internal.distributed.fake_pg")


# --- Device meshes and DTensor ----------------------------------------------------------------------------------------


def as_dtensor(block: Tensor, like: DTensor, placements: tuple[Placement, ...] | None = None) -> DTensor:
    """The DTensor whose local tensor is `block`, laid out as another one, or with other placements.

    As FSDP2 wraps its gradients: `from_local` builds and checks the specification anew, a fifth of a small step; and
    `DTensor(...)`, which asks the compiler to look away from an `__init__` that does nothing, takes three times as long
    as its `__new__`.
    """
    # DTensor takes over where a block begins in its storage, and a tensor that begins anywhere but at 0 has data of its
    # own for `copy.deepcopy`, which no DTensor has.
    begins = block if block.storage_offset() == 0 else block.new_empty(0)
    kind, spec = type(like), like._spec
    if placements is not None:
        spec = type(spec)(spec.mesh, placements, spec.tensor_meta)
    wrapped = kind.__new__(kind, begins, spec, requires_grad=False)
    wrapped._local_tensor = block
    return wrapped


def local_tensor(whole: DTensor) -> Tensor:
    """This rank's own tensor, as it is. Not differentiable.

    `to_local` gives the same one where no graph is made, but from torch 2.13 on, of a parameter, as a new view at every
    call, which takes as long as a small operator.
    """
    return whole._local_tensor


def forget_shardings(*, dispatching: bool = False) -> None:
    """What DTensor has worked out of operators and of ways from one layout to another, each with its mesh.

    `torch.distributed.tensor.debug` has the first two lines as a function. To import it takes all of torch's compiler
    along, a fifth of what starting a process costs.

    Args:
        dispatching: this may run in the midst of an operator. Torch works on in its own cache then, which would be gone
            (a segmentation fault), so that stays as it is.
    """
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if not dispatching:
        private("_C._clear_DTensor_sharding_propagator_cache")()
    private("distributed.tensor._redistribute.clear_redistribute_planner_cache")()


def merge_dims(mesh: DeviceMesh, name: str) -> None:
    """Makes a group of all ranks of a mesh, under a name: what would go dim by dim then goes at once."""
    mesh._flatten(name)


def accept_mesh_order() -> None:
    """Lets DTensor redistribute over meshes whose dims do not stand in the order of their ranks, as a cube's do not.

    Before each redistribution torch looks for a merged mesh that somebody made (`merge_dims`), to take several steps at
    once. Where dims stand in another order, torch 2.11 and 2.12 end that look-up by a KeyError ("Mesh dim indices
    should be in ascending order") instead of finding none, so `parameter.full_tensor()` fails. From 2.13 on they find
    none. Once a process is enough.
    """
    module: Any = import_module("torch.distributed.tensor._redistribute")
    before = getattr(module, "_get_flattened_mesh_by_layout", None)
    if _release() >= (2, 13) or before is None or hasattr(before, "_before"):
        return

    def merged_mesh(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
        try:
            found: DeviceMesh | None = before(mesh, mesh_dims)
        except KeyError:
            return None
        return found

    merged_mesh._before = before  # type: ignore[attr-defined]
    module._get_flattened_mesh_by_layout = merged_mesh


@cache
def _release() -> tuple[int, ...]:
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


# --- A device type of our own -----------------------------------------------------------------------------------------


def own_device_backend() -> type[Any]:
    """The class of what torch asks of a device type that Python code adds."""
    found: type[Any] = import_module("torch.utils.backend_registration")._DummyBackendModule
    return found


def own_device_name() -> str:
    """What the device type for whoever adds one is called in this process; "privateuseone": nobody has."""
    return str(private("_C._get_privateuse1_backend_name")())


def add_own_device(name: str, backend: object) -> None:
    """Gives that type its name, and what torch asks of it; once a process."""
    private("utils.backend_registration._setup_privateuseone_for_python_backend")(name, backend_module=backend)
