"""From text to batches: ``tokenizer`` (text <-> ids), ``sources`` (where documents come from), ``corpus`` (their
ids, split into training and held-out) and ``stream`` (this peer's own order of reading)."""
