"""The kernels of the `triton` experts backend. `ops` and `device` import triton, `tiles` does not."""
