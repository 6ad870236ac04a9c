"""Every kernel of attention computes what the portable one does, or says why it does not run.

Splash and Triton are emulated (Pallas' interpreter), cuDNN is only traced; that splash compiles
for TPUs is checked where libtpu is installed.

Legend: B batch, T time (queries), S keys' length, N query heads, K kv heads, H head dim.
"""

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from openelm_jax.errors import UserError
from openelm_jax.model.attention import LOG_PARTITION, OUT, causal_attend
from openelm_jax.parallel import attention
from openelm_jax.parallel.attention import choose_kernel, over_context
from openelm_jax.parallel.kernels import cudnn_attend, splash_attend, triton_attend

TESTS = Path(__file__).parent
TPU = {"platform": "tpu", "device_kind": "TPU v5 lite", "dtype": jnp.bfloat16, "head_dim": 64}
GPU = {"platform": "gpu", "device_kind": "NVIDIA H100", "dtype": jnp.bfloat16, "head_dim": 128}
CPU = {"platform": "cpu", "device_kind": "cpu", "dtype": jnp.float32, "head_dim": 64}
WHOLE = {"context_length": 2048, "isolating": False, "probe": False}
APART = {"context_length": 2048, "isolating": True, "probe": False}


def draw(num_queries, num_keys, head_dim, heads=4, kv_heads=1, dtype=jnp.float32, batch=1):
    """Return query, key, value, a cotangent, and the numbers of three documents a row."""
    rng = np.random.default_rng(0)
    lengths = [(num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads)]
    arrays = [
        jnp.asarray(rng.normal(size=(batch, length, count, head_dim)), dtype)
        for length, count in [*lengths, lengths[0]]
    ]
    return *arrays, jnp.asarray(rng.integers(0, 2, (batch, num_keys)).cumsum(axis=1) // 40)


def value_and_gradients(kernel, segments, first, query, key, value, cotangent):
    """Return the mixture and the gradients of query, key and value, `first` traced."""

    @jax.jit
    def both(first):
        attend = functools.partial(kernel, segments=segments, first=first)
        mixed, pull_back = jax.vjp(attend, query, key, value)
        return mixed, *pull_back(cotangent)

    return both(jnp.int32(first))


@pytest.mark.parametrize(
    ("head_dim", "num_queries", "num_keys", "first", "apart", "blocks"),
    [
        pytest.param(128, 256, 256, 0, False, (128, 128), id="whole"),
        pytest.param(64, 256, 256, 0, True, (128, 256), id="documents apart"),
        pytest.param(128, 128, 256, 128, True, (512, 1024), id="second half of the tokens"),
        pytest.param(64, 128, 384, 128, False, (128, 128), id="second third, gradients apart"),
    ],
)
def test_splash_is_the_portable_attention(head_dim, num_queries, num_keys, first, apart, blocks):
    *arrays, ids_BS = draw(num_queries, num_keys, head_dim)
    segments = (ids_BS[:, first : first + num_queries], ids_BS) if apart else None
    splash = functools.partial(splash_attend, blocks, True)

    ours = value_and_gradients(splash, segments, first, *arrays)

    expected = value_and_gradients(causal_attend, segments, first, *arrays)
    for actual, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5)


def test_a_probe_compares_a_kernel_of_gpus_with_the_portable_one(monkeypatch):
    """Triton's passes, emulated; one that forgets the documents does not."""
    place = {**GPU, "dtype": jnp.float32, "head_dim": 64, "context_length": 4096}
    place.update(isolating=True, interpret=True)

    assert choose_kernel("auto", **place).name == "triton"

    forgetful = lambda interpret, *arrays: causal_attend(*arrays[:3])  # noqa: E731
    monkeypatch.setattr(attention, "triton_attend", forgetful)
    with pytest.raises(UserError, match="computes wrong numbers on this NVIDIA H100"):
        choose_kernel("auto", **place)


def primitives(jaxpr, count):
    """Count the primitives of a jaxpr, Pallas' kernels by name, whatever they are nested in."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pallas_call":
            count[equation.params["name"]] += 1
            continue
        count[name] += 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                primitives(getattr(inner, "jaxpr", inner), count)
    return count


FORWARD = [
    pytest.param(causal_attend, "dot_general", 2, 5, id="portable"),
    pytest.param(
        functools.partial(splash_attend, (512, 1024), True),
        *("splash_mha_fwd_residuals", 1, 0),
        id="splash",
    ),
    pytest.param(functools.partial(triton_attend, True), "mha_forward", 1, 0, id="triton"),
    pytest.param(cudnn_attend, "dot_product_attention_fwd_wrapper", 1, 0, id="cudnn"),
]
"""(kernel, primitive, times a forward pass runs it, times a backward pass does)."""


@pytest.mark.parametrize(("kernel", "name", "forward", "backward"), FORWARD)
def test_a_policy_that_keeps_the_names_computes_no_attention_again(
    kernel, name, forward, backward, monkeypatch
):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    *arrays, _, _ = draw(256, 256, 64, dtype=jnp.bfloat16)

    def block(query, key, value):
        return jnp.sin(kernel(jnp.sin(query), jnp.sin(key), jnp.sin(value)))

    def count(policy):
        loss = lambda *qkv: jax.checkpoint(block, policy=policy)(*qkv).astype(jnp.float32).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays)
        return primitives(jaxpr.jaxpr, Counter())[name]

    assert count(None) == 2 * forward + backward  # the test can see what is computed again
    names = jax.checkpoint_policies.save_only_these_names(OUT, LOG_PARTITION)
    assert count(names) == forward + backward


def test_the_names_stand_for_the_mixture_and_a_number_a_query():
    """So that what a policy keeps is no larger than it is said to be."""
    query, key, value, _, _ = draw(256, 256, 64, dtype=jnp.bfloat16)
    names = jax.checkpoint_policies.save_only_these_names(OUT, LOG_PARTITION)
    for kernel in (causal_attend, functools.partial(splash_attend, (512, 1024), True)):
        _, pull_back = jax.vjp(jax.checkpoint(kernel, policy=names), query, key, value)
        kept = [x for x in jax.tree.leaves(pull_back) if jnp.issubdtype(x.dtype, jnp.floating)]
        sizes = sorted(x.size for x in kept if not any(x is y for y in (query, key, value)))
        assert sizes == [256 * 4, 256 * 4 * 64]


@pytest.mark.parametrize(
    ("asked", "place", "name", "reason"),
    [
        ("auto", {**CPU, **WHOLE}, "portable", "portable"),
        ("auto", {**TPU, **WHOLE}, "splash", "splash, blocks 512 x 1024"),
        ("auto", {**TPU, **APART, "device_kind": "TPU v6 lite"}, "splash", "splash, blocks 1024"),
        ("auto", {**TPU, **WHOLE, "context": 8}, "splash", "splash, blocks 256 x 1024"),
        ("auto", {**TPU, **WHOLE, "head_dim": 16}, "portable", "head_dim of 64"),
        ("auto", {**GPU, **WHOLE}, "cudnn", "cudnn"),
        ("auto", {**GPU, **APART}, "triton", "keeps documents apart"),
        ("auto", {**GPU, **WHOLE, "dtype": jnp.float32}, "portable", "training.dtype is float32"),
        ("portable", {**GPU, **WHOLE, "context_length": 8192}, "portable", "8,192 x 8,192 scores"),
    ],
)
def test_each_platform_has_its_kernel(asked, place, name, reason):
    kernel = choose_kernel(asked, **place)

    assert kernel.name == name
    assert reason in kernel.reason


@pytest.mark.parametrize(
    ("asked", "place", "message"),
    [
        ("splash", {**CPU, **WHOLE}, "splash runs on TPUs and this is a CPU"),
        ("splash", {**TPU, **WHOLE, "context_length": 2000}, "multiple of 128 tokens a device"),
        ("splash", {**TPU, **WHOLE, "context": 32}, "multiple of 128 tokens a device, not 64"),
        ("cudnn", {**TPU, **WHOLE}, "runs on GPUs and this is a TPU"),
        ("cudnn", {**GPU, **APART}, "keeps no documents apart .data.isolate_documents."),
        ("cudnn", {**GPU, **WHOLE, "dtype": jnp.float32}, "training.dtype is float32"),
        ("cudnn", {**GPU, **WHOLE, "context": 2}, "over mesh.context=2 devices"),
        ("cudnn", {**GPU, **WHOLE, "probe": True}, "fails on this NVIDIA H100 .cuDNN is not"),
        ("auto", {**TPU, **WHOLE, "context_length": 4100}, "4,100 x 4,100 scores a head"),
        ("auto", {**GPU, **APART, "context_length": 4096, "context": 2}, "2,048 x 4,096 scores"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(asked, place, message):
    with pytest.raises(UserError, match=message) as refusal:
        choose_kernel(asked, **place)

    assert "--training.attention portable" in str(refusal.value)
    assert str(refusal.value).endswith(".")


def compare_over_context():
    """Attention over 2 and 4 devices is that of one, segments and gradients included."""
    splash = functools.partial(splash_attend, (128, 128), True)
    for size, kernel, num_tokens in [
        (2, causal_attend, 64),
        (4, causal_attend, 64),
        (2, splash, 256),
    ]:
        *arrays, ids_BS = draw(num_tokens, num_tokens, 64, batch=2 if num_tokens == 64 else 1)
        tokens = PartitionSpec(None, "context")

        mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
        attend = over_context(kernel, "context", size)
        sharded = jax.shard_map(
            attend, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens, check_vma=False
        )

        @jax.jit
        def both(*arrays, sharded=sharded, ids_BS=ids_BS):
            attend = lambda *qkv: sharded(*qkv, ids_BS)  # noqa: E731
            mixed, pull_back = jax.vjp(attend, *arrays[:3])
            return mixed, *pull_back(arrays[3])

        expected = value_and_gradients(causal_attend, (ids_BS, ids_BS), 0, *arrays)
        for actual, wanted in zip(both(*arrays), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5)

        halves = [x.astype(jnp.bfloat16) for x in arrays]
        jaxpr = jax.make_jaxpr(both)(*halves).jaxpr
        assert scattered(jaxpr) == [jnp.float32] * 2  # the gradients of keys and values


def scattered(jaxpr):
    """Return the dtypes of what is reduced over devices."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("reduce_scatter", "psum_scatter", "psum"):
            found += [x.aval.dtype for x in equation.invars]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += scattered(getattr(inner, "jaxpr", inner))
    return found


def run_here(function, **environment):
    """Call a function of this file in a process of its own."""
    command = f"import test_attention_kernels as tests; tests.{function}"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent), **environment},
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.heavy
def test_attention_over_devices_is_that_of_one():
    run_here("compare_over_context()", XLA_FLAGS="--xla_force_host_platform_device_count=4")


def compile_splash(topology_name, head_dim):
    """Compile splash and its gradient for a TPU that is not here."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    device = topology.devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    kernel = choose_kernel(
        "auto",
        **{**TPU, **APART, "device_kind": device.device_kind, "head_dim": head_dim},
    )

    def loss(query, key, value, ids):
        return kernel.attend(query, key, value, (ids, ids), 0).astype(jnp.float32).sum()

    query, key = (
        jax.ShapeDtypeStruct((1, 2048, count, head_dim), jnp.bfloat16, sharding=place)
        for count in (4, 1)
    )
    ids = jax.ShapeDtypeStruct((1, 2048), jnp.int32, sharding=place)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, key, ids).compile()
    kept = compiled.memory_analysis().temp_size_in_bytes
    assert kept < 4 * 2048 * 2048 * 2, f"{kept} bytes hold a square of scores"
    print(compiled.as_text().count('custom_call_target="tpu_custom_call"'))


@pytest.mark.heavy
@pytest.mark.parametrize("topology_name", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_splash_compiles_for_tpus(topology_name, head_dim):
    pytest.importorskip("libtpu")

    kernels = run_here(
        f"compile_splash({topology_name!r}, {head_dim})",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_SKIP_MDS_QUERY="1",
    )

    assert int(kernels.split()[-1]) == 2  # forward; and all gradients at once
