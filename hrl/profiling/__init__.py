"""What a process does with its time: ranges with names, torch's profiler, and sums over classes of operators."""
