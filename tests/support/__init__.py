"""What the tests share, none of it a test: the oracle, batches, tolerances, models, and the generators of the fuzzer."""
