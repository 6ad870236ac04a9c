"""The line at the start tells whether the disk had the compiled step."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from openelm_jax.training.compilation import compile_step


@pytest.fixture
def empty_cache(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update(names[0], str(tmp_path))
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_second_compilation_of_a_function_is_a_hit(empty_cache):
    x = jnp.arange(7.0)

    def compiled(factor):
        return compile_step(jax.jit(lambda x: jnp.sin(x) * factor), x)

    first, other, again = compiled(3.0), compiled(5.0), compiled(3.0)

    assert (first.cache, other.cache, again.cache) == ("miss", "miss", "hit")
    assert first.function(x)[2] == again.function(x)[2] == jnp.sin(2.0) * 3.0


def test_a_line_before_and_one_after_tell_what_is_compiled(empty_cache):
    said = []
    x = jnp.arange(5.0)

    done = compile_step(jax.jit(jnp.cos), x, what="2 layers for 1 device", say=said.append)

    assert said == [
        "compiling 2 layers for 1 device ...",
        f"compiled 2 layers for 1 device in {done.seconds:.1f} s (cache miss)",
    ]


def test_the_compiler_gets_the_options():
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        compile_step(jax.jit(jnp.cos), jnp.arange(5.0), options={"xla_no_such_option": "true"})
