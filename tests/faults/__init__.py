"""Faults in virtual time: real fronts, workers, board and links in one thread. One seed decides everything.

python -m tests.faults --seeds 100            many seeds; prints how to repeat each that fails
python -m tests.faults --start 17 --seeds 1   one of them
"""
