"""A table before it is printed: which number stands where, which are marked, what stands under it."""
