"""One algorithm box of a paper, one file: generators that turn a problem and a state into successive rounds.

fedavg               federated averaging, by any aggregator and local loss
fedavg_mixed         FedAvg where only some clients train adversarially
fedavg_validated     FedAvg where validators say when the learning rate falls
fedsgd               every batch is one step of the server
dsgd                 the same under any aggregator, with momentum at the clients
scaffold             SCAFFOLD: control variates against client drift
scaffold_sfat        SCAFFOLD as the SFAT release runs it
fednova              FedNova: updates normalised by their local steps
fedgate              FedGATE: gradient tracking
fedbn                FedBN: batch normalisation stays local
fedper               FedPer: the last layer stays local
fedrbn               FedRBN: robustness propagated by batch normalisation
fltrust              FLTrust: updates weighted by their agreement with the server's
fedaux               FedAUX: FedAvg, then ensemble distillation on auxiliary data
auxiliary            FedAUX's work before the first round
fedgkt               FedGKT: knowledge transfer between small devices and a large server
fedvkd               FedVKD: distillation between ResNets on the edges and a ViT on the server
distillation         what the distillation algorithms share
local_only           no federation: every client trains alone
centralized          no federation: all data in one place
work                 what training costs, counted before it runs
gradient_inversion   a server inverts the updates of target clients; nothing is learned
"""

from __future__ import annotations

from fatbench.methods.algorithms.centralized import CENTRALIZED
from fatbench.methods.algorithms.dsgd import DSGD
from fatbench.methods.algorithms.fedaux import FEDAUX
from fatbench.methods.algorithms.fedavg import FEDAVG
from fatbench.methods.algorithms.fedavg_mixed import FEDAVG_MIXED
from fatbench.methods.algorithms.fedavg_validated import FEDAVG_VALIDATED
from fatbench.methods.algorithms.fedbn import FEDBN
from fatbench.methods.algorithms.fedgate import FEDGATE
from fatbench.methods.algorithms.fedgkt import FEDGKT
from fatbench.methods.algorithms.fednova import FEDNOVA
from fatbench.methods.algorithms.fedper import FEDPER
from fatbench.methods.algorithms.fedrbn import FEDRBN
from fatbench.methods.algorithms.fedsgd import FEDSGD
from fatbench.methods.algorithms.fedvkd import FEDVKD
from fatbench.methods.algorithms.fltrust import FLTRUST
from fatbench.methods.algorithms.gradient_inversion import GRADIENT_INVERSION
from fatbench.methods.algorithms.local_only import LOCAL_ONLY
from fatbench.methods.algorithms.scaffold import SCAFFOLD
from fatbench.methods.algorithms.scaffold_sfat import SCAFFOLD_SFAT

ALGORITHMS = {
    "fedavg": FEDAVG,
    "fedavg_validated": FEDAVG_VALIDATED,
    "fedavg_mixed": FEDAVG_MIXED,
    "fedbn": FEDBN,
    "fedper": FEDPER,
    "fedrbn": FEDRBN,
    "fltrust": FLTRUST,
    "scaffold": SCAFFOLD,
    "scaffold_sfat": SCAFFOLD_SFAT,
    "fedgate": FEDGATE,
    "fednova": FEDNOVA,
    "fedgkt": FEDGKT,
    "fedvkd": FEDVKD,
    "fedaux": FEDAUX,
    "fedsgd": FEDSGD,
    "dsgd": DSGD,
    "gradient_inversion": GRADIENT_INVERSION,
    "centralized": CENTRALIZED,
    "local_only": LOCAL_ONLY,
}
