"""An Ascend NPU emulated in host memory, under the real torch_npu."""
