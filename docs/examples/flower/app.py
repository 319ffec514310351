"""Adversarial training by Flower's clients; an aggregator, the attacks and the table are fatbench's. `flwr run .`"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fatbench

client = ClientApp()
server = ServerApp()
EPS = 8 / 255


def network() -> torch.nn.Module:
    """A linear classifier of scikit-learn's digits."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


@client.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of PGD adversarial training on this node's images."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = fatbench.load_data("digits", "train")
    node, nodes = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    shard = torch.from_numpy(fatbench.partition(y, "dirichlet", clients=nodes, alpha=0.5, seed=0)[node])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in shard.split(32):
        x_adv = fatbench.attacks.pgd(model, x[batch], y[batch], eps=EPS, step=EPS / 2, steps=2)
        loss = torch.nn.functional.cross_entropy(model(x_adv), y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(shard), "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Aggregated(FedAvg):
    """Flower's FedAvg with an aggregator of fatbench in place of the mean."""

    def __init__(self, aggregator: str) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.aggregator = aggregator

    def aggregate_train(self, server_round, replies):
        """Combine the state dicts of the clients that answered."""
        answered = [one.content for one in replies if not one.has_error()]
        uploads = [content["arrays"].to_torch_state_dict() for content in answered]
        sizes = [content["metrics"]["num-examples"] for content in answered]
        return ArrayRecord(fatbench.aggregate(self.aggregator, uploads, sizes=sizes)), None


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, then attack the model that is left; its row lies in flower.db, in the folder of `flwr`'s server."""
    strategy = Aggregated(str(context.run_config["aggregator"]))
    rounds = int(context.run_config["rounds"])
    found = strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=rounds)
    model = network()
    model.load_state_dict(found.arrays.to_torch_state_dict())
    name = f"Flower, {strategy.aggregator}"
    print(fatbench.evaluate(model, "digits", ["pgd20", "autoattack"], eps=EPS, name=name, db="flower.db"))
