"""Large results of native operations outside of recorded passes: memory is taken again, and given back in the end."""

import shutil
import threading

import pytest
import torch

if not shutil.which("g++"):
    pytest.importorskip("mtp_backend._native")
from mtp_backend import _native as native

LARGE = 1 << 20  # elements


def result(value, size=LARGE):
    return native.add(torch.full((1, size), value).bfloat16(), torch.zeros(1, size).bfloat16())


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))


def test_memory_is_taken_again_when_no_tensor_has_it():
    first = result(1.0)
    address, view = first.data_ptr(), first[0, 7:9]
    del first
    second = result(2.0)
    assert second.data_ptr() != address
    assert view.tolist() == [1, 1] and second[0, 0] == 2
    del view
    assert result(3.0).data_ptr() == address
    assert second.unique().tolist() == [2]


def test_a_result_has_its_own_shape_and_length():
    longer = result(1.0)
    address = longer.data_ptr()
    del longer
    shorter = result(4.0, LARGE - 64)
    assert shorter.data_ptr() == address
    assert shorter.shape == (1, LARGE - 64) and shorter.is_contiguous() and shorter.unique().tolist() == [4]
    # Less than half of it: another would miss the memory more.
    del shorter
    assert result(5.0, LARGE // 2 - 64).data_ptr() != address


def test_results_may_have_gradients_outside_of_inference_mode():
    with torch.inference_mode():
        inside = result(1.0)
    outside = result(1.0)
    assert inside.is_inference() and not outside.is_inference()
    weight = torch.ones(1, LARGE, requires_grad=True)
    (outside.float() * weight).sum().backward()
    assert weight.grad.unique().tolist() == [1]


def test_what_is_not_taken_any_more_is_given_back():
    result(1.0, 100 << 20)
    held = resident_mib()
    for _ in range(2 * 2048):
        result(1.0, 1 << 16)
    assert resident_mib() < held - 150


def test_a_thread_has_its_own():
    mine = result(1.0)
    address = mine.data_ptr()
    del mine
    other = []
    thread = threading.Thread(target=lambda: other.append(result(2.0)))
    thread.start()
    thread.join()
    assert other[0].data_ptr() != address
    assert result(3.0).data_ptr() == address
    assert other[0].unique().tolist() == [2]  # though its thread has ended
