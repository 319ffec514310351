"""One algorithm box of a paper, one file: generators that turn a problem and a state into successive rounds."""

from __future__ import annotations

from fatbench.methods.protocols.centralized import centralized
from fatbench.methods.protocols.eavesdrop import eavesdrop
from fatbench.methods.protocols.fedaux import fedaux
from fatbench.methods.protocols.fedavg import fedavg
from fatbench.methods.protocols.fedavg_validated import fedavg_validated
from fatbench.methods.protocols.fedgate import fedgate
from fatbench.methods.protocols.fedgkt import fedgkt
from fatbench.methods.protocols.fednova import fednova
from fatbench.methods.protocols.fedsgd import fedsgd
from fatbench.methods.protocols.fedvkd import fedvkd
from fatbench.methods.protocols.scaffold import scaffold
from fatbench.methods.protocols.scaffold_sfat import scaffold_sfat

PROTOCOLS = {
    "fedavg": fedavg,
    "fedavg_validated": fedavg_validated,
    "scaffold": scaffold,
    "scaffold_sfat": scaffold_sfat,
    "fedgate": fedgate,
    "fednova": fednova,
    "fedgkt": fedgkt,
    "fedvkd": fedvkd,
    "fedaux": fedaux,
    "fedsgd": fedsgd,
    "eavesdrop": eavesdrop,
    "centralized": centralized,
}
