"""Python's collector of reference cycles, without what is there for good.

What refers to itself, such as a failed dial's exception and the frames that its traceback holds, is freed by a pass of
the collector only, and what has survived two passes by a full one. CPython makes a full pass by itself when what came
since the last one is more than a quarter of what survived that, with torch and transformers loaded 100,000 objects: so
megabytes of such garbage stay for half an hour, and the pass then stops all threads, the trainer's among them, for
tenths of a second. ``settle`` takes everything that was made so far out of all passes (``gc.freeze``). A full pass
takes milliseconds then, and ``resources`` makes one before each of its entries.
"""

import gc


def settle() -> int:
    """Collect once more, and never look at what is left again. How many objects that is.

    Call it when a process has loaded and built what it keeps until it ends: a cycle that is in use now is not freed
    later.
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
