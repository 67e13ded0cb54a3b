"""Judges pairs with the public test-suite evaluator (taoyds/test-suite-sql-eval), from a checkout of it.

    python benchmarks/curation_peer.py <request.json>

The request holds `checkout`, `pairs` (JSONL with `sql`, `gold` and `database`, a copy alone in its folder: the evaluator
opens databases writable, and judges on all that lie side by side), `keep_distinct`, and `verdicts`: a file that gets one
line a pair, `0`, `1` or `error`, and the seconds it took. Calls `exec_eval.eval_exec_match` as `evaluation.py --etype exec` does, in one process. Imports
nothing of ours: it may run in another environment (`pip install sqlparse tqdm`). A query that never ends is not
bounded by the evaluator; whoever started this process has to end it.
"""

import json
import sys
import time


def main(path):
    with open(path) as stream:
        request = json.load(stream)
    sys.path.insert(0, request["checkout"])
    from exec_eval import eval_exec_match  # pyright: ignore[reportMissingImports]

    with open(request["pairs"]) as stream:
        pairs = [json.loads(line) for line in stream]
    with open(request["verdicts"], "w") as verdicts:
        for pair in pairs:
            started = time.perf_counter()
            try:
                verdict = eval_exec_match(
                    pair["database"], pair["sql"], pair["gold"], False, request["keep_distinct"], False
                )
            except Exception:  # it raises on queries that sqlparse cannot read, and on golds that fail
                verdict = "error"
            verdicts.write(f"{verdict} {time.perf_counter() - started:.6f}\n")
            verdicts.flush()


if __name__ == "__main__":
    main(sys.argv[1])
