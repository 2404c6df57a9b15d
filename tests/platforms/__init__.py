"""What every platform does alike: one suite, run on each of them."""
