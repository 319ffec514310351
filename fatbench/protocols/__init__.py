"""One algorithm box of a paper, one file: generators that turn a problem and a state into successive rounds."""

from __future__ import annotations

from fatbench.protocols.centralized import centralized
from fatbench.protocols.eavesdrop import eavesdrop
from fatbench.protocols.fedaux import fedaux
from fatbench.protocols.fedavg import fedavg
from fatbench.protocols.fedgate import fedgate
from fatbench.protocols.fedgkt import fedgkt
from fatbench.protocols.fednova import fednova
from fatbench.protocols.fedsgd import fedsgd
from fatbench.protocols.fedvkd import fedvkd
from fatbench.protocols.scaffold import scaffold
from fatbench.protocols.scaffold_sfat import scaffold_sfat

PROTOCOLS = {
    "fedavg": fedavg,
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
