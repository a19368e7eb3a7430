"""Draw the scaling plot in the guide on planning: `python -m docs.scaling` writes docs/images/scaling.svg."""

from __future__ import annotations

from pathlib import Path

from fused_tp.planning import published

# Numbers of GPUs over which 1152 rows divide evenly with pp 6 and tp 8.
GPUS = (96, 144, 288, 576, 1152, 2304, 4608)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    # Makes the file small and reproducible.
    matplotlib.rcParams |= {"svg.hashsalt": "fused_tp", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, (strong, weak) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    strong.plot(GPUS, [100 * published.strong_scaling(gpus).mfu for gpus in GPUS], "o-", label="predicted")
    strong.plot(*zip(*published.STRONG_SCALING, strict=True), "k^", label="published")
    strong.set_title("Strong scaling: 177B parameters, 1152 rows")
    rows = published.weak_scaling_rows()
    gpus = [row.model.config.world_size for row in rows]
    weak.plot(gpus, [row.predicted for row in rows], "o-", label="predicted")
    weak.plot(gpus, [row.published for row in rows], "k^--", label="published")
    for row, num_gpus in zip(rows, gpus, strict=True):
        label_style = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        weak.annotate(row.model.shape.name, (num_gpus, max(row.predicted, row.published)), **label_style)
    weak.set_title("Weak scaling: 1.7B to 462B parameters")
    for axes in (strong, weak):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("H100 GPUs")
        axes.grid(alpha=0.3)
        axes.legend()
    strong.set_ylim(0, 60)
    strong.set_ylabel("MFU, %")
    figure.savefig(Path(__file__).parent / "images" / "scaling.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
