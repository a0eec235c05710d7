"""The native CPU kernels against float32, at every instruction set of the machine that runs the tests."""

import math
import shutil

import pytest
import torch

native = pytest.importorskip("mtp_backend._native") if not shutil.which("g++") else None
if native is None:
    from mtp_backend import _native as native

LEVELS = native.levels()


@pytest.fixture(autouse=True, params=LEVELS)
def level(request):
    torch.manual_seed(0)
    native.use_level(request.param)
    yield request.param
    native.use_level(LEVELS[0])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("k", [1, 31, 64, 100, 1000, 2100])
@pytest.mark.parametrize("n", [1, 17, 32, 70])
def test_linear_is_the_product_of_float32_and_its_rows_do_not_depend_on_the_batch(n, k):
    x, weight, bias = normal(70, k), normal(n, k), normal(n)
    result = native.linear(x, weight, bias, wide=True)
    torch.testing.assert_close(result, x.float() @ weight.float().T + bias.float(), rtol=1e-5, atol=1e-5 * k**0.5)
    assert torch.equal(native.linear(x, weight, bias), result.bfloat16())
    for rows in (slice(0, 1), slice(7, 9), slice(54, 70), slice(0, 17), slice(3, 36)):
        assert torch.equal(native.linear(x[rows], weight, bias, wide=True), result[rows])


def test_threads_do_not_change_a_product(threads):
    x, weight = normal(40, 512), normal(1000, 512)
    expected = torch.cat([native.linear(x, part) for part in weight.split(100)], dim=1)
    assert torch.equal(native.linear(x, weight), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_an_output_does_not_depend_on_the_others(rows, dtype):
    """Some are summed side by side, those that are left over one by one."""
    x, weight, scale = normal(rows, 200), (torch.randn(39, 200) * 20).to(dtype), torch.rand(39)
    scales = [scale] * (dtype == torch.int8)
    together = native.linear(x, weight, None, True, *scales)
    for output in range(39):
        alone = [part[output : output + 1] for part in (weight, *scales)]
        assert torch.equal(native.linear(x, alone[0], None, True, *alone[1:])[:, 0], together[:, output])


def test_linear_takes_rows_that_lie_apart():
    x, weight = normal(5, 96), normal(40, 96)
    expected = native.linear(x[:, 32:64].contiguous(), weight[::2, 16:48].contiguous())
    assert torch.equal(native.linear(x[:, 32:64], weight[::2, 16:48]), expected)


def test_nan_stays_in_its_row():
    x, weight = normal(20, 40), normal(33, 40)
    x[3, 39] = math.nan
    result = native.linear(x, weight)
    assert result[3].isnan().all()
    assert not result[[0, 2, 4, 19]].isnan().any()


def test_no_rows():
    assert native.linear(normal(0, 8), normal(3, 8)).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((normal(2, 8).float(), normal(3, 8)), "x: Float; allowed: BFloat16"),
        ((normal(2, 8), normal(3, 9)), r"x: shape \[2, 8\]; allowed: \[-1, 9\]"),
        ((normal(2, 8), normal(8, 3).T), "weight: elements of the last dimension lie apart"),
        ((normal(2, 8), normal(3, 8), normal(4)), r"bias: shape \[4\]; allowed: \[3\]"),
        ((normal(8), normal(3, 8)), r"x: shape \[8\]; allowed: \[-1, 8\]"),
    ],
)
def test_wrong_tensors_are_named(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        native.linear(*arguments)


def test_an_unknown_level_is_refused():
    with pytest.raises(RuntimeError, match="level: sse9"):
        native.use_level("sse9")


def test_the_process_has_one_openmp_library():
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}) == 1
