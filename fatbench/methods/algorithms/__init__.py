"""One algorithm box of a paper, one file: generators that turn a problem and a state into successive rounds."""

from __future__ import annotations

from fatbench.methods.algorithms.centralized import centralized
from fatbench.methods.algorithms.fedaux import fedaux
from fatbench.methods.algorithms.fedavg import fedavg
from fatbench.methods.algorithms.fedavg_mixed import fedavg_mixed
from fatbench.methods.algorithms.fedavg_validated import fedavg_validated
from fatbench.methods.algorithms.fedbn import fedbn
from fatbench.methods.algorithms.fedgate import fedgate
from fatbench.methods.algorithms.fedgkt import fedgkt
from fatbench.methods.algorithms.fednova import fednova
from fatbench.methods.algorithms.fedrbn import fedrbn
from fatbench.methods.algorithms.fedsgd import fedsgd
from fatbench.methods.algorithms.fedvkd import fedvkd
from fatbench.methods.algorithms.fltrust import fltrust
from fatbench.methods.algorithms.gradient_inversion import gradient_inversion
from fatbench.methods.algorithms.scaffold import scaffold
from fatbench.methods.algorithms.scaffold_sfat import scaffold_sfat

ALGORITHMS = {
    "fedavg": fedavg,
    "fedavg_validated": fedavg_validated,
    "fedavg_mixed": fedavg_mixed,
    "fedbn": fedbn,
    "fedrbn": fedrbn,
    "fltrust": fltrust,
    "scaffold": scaffold,
    "scaffold_sfat": scaffold_sfat,
    "fedgate": fedgate,
    "fednova": fednova,
    "fedgkt": fedgkt,
    "fedvkd": fedvkd,
    "fedaux": fedaux,
    "fedsgd": fedsgd,
    "gradient_inversion": gradient_inversion,
    "centralized": centralized,
}
