"""Who is there when, whose upload is lost, and who is slow: a function, or a table of a real trace.

fedtailor run fedavg digits --cohort attendance.py:nights --rounds 6
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from made import clients

import fedtailor as ft


def nights(number, names, draw):
    """Half of the clients by chance; the first of them is lost after training; the last manages half of its steps."""
    there = list(draw.choice(names, max(2, len(names) // 2), replace=False))
    return there, there[:1], {there[-1]: 0.5}


def main():
    federation = ft.Federation.from_arrays(clients(seed=0), clients(seed=100))
    run = ft.run(ft.Scaffold(lr=0.3, steps=4), federation, cohort=nights, rounds=6)
    print([(record["cohort"], record.get("lost", 0)) for record in run.history])

    with TemporaryDirectory() as folder:
        trace = Path(folder) / "who.csv"
        trace.write_text("round,client,lost,pace\n0,0,0,1\n0,1,1,1\n1,2,0,0.25\n1,3,0,1\n")
        print([record["cohort"] for record in ft.run(ft.FedAvg(), federation, cohort=trace, rounds=4).history])


if __name__ == "__main__":
    main()
