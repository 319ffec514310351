"""Results as a data set that other programs can find and load: a CSV described in Croissant 1.0 (JSON-LD).

https://docs.mlcommons.org/croissant: `mlcroissant.Dataset("croissant.json").records("numbers")` reads the rows.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from fatbench.version import __version__

if TYPE_CHECKING:
    import pandas

COLUMNS = {  # of `fatbench.results` and of the view `measurements`
    "cell": "the experiment: the first letters of its settings' SHA-256",
    "seed": "what all random draws of the experiment begin from",
    "stage": "train, or an evaluation and the round of its checkpoint",
    "metric": "what was measured: natural, pgd20, autoattack, loss, ...",
    "round": "the round it is of, from 1",
    "client": "the client it is about, from 0; -1: about none",
    "value": "a fraction in [0, 1] or a plain number",
    "n": "the images behind it; 0: none",
    "suite": "of the run that measured it",
    "preset": "of the run that measured it",
    "commit": "the code that measured it",
    "dirty": "whether that code had changes that were not committed",
    "device": "the machine's device that measured it",
    "precision": "of the floating-point numbers",
    "created": "when it was stored, UTC",
    "run": "the run that measured it",
    "attack": "all settings of the attack",
    "settings": "all settings of the attack, as JSON",
    "outcomes": "how many outcomes of single images are stored",
    "replicate": "0: the first run of the cell here, else the number of a further one",
    "replicate_of": "the cell whose replicate this is",
    "doubts": "why to doubt it, in words",
}
CONTEXT = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "column": "cr:column",
    "conformsTo": "dct:conformsTo", "cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"}, "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/", "examples": {"@id": "cr:examples", "@type": "@json"}, "extract": "cr:extract",
    "field": "cr:field", "fileProperty": "cr:fileProperty", "fileObject": "cr:fileObject", "fileSet": "cr:fileSet",
    "format": "cr:format", "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath",
    "key": "cr:key", "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "recordSet": "cr:recordSet",
    "references": "cr:references", "regex": "cr:regex", "repeated": "cr:repeated", "replace": "cr:replace",
    "sc": "https://schema.org/", "separator": "cr:separator", "source": "cr:source", "subField": "cr:subField",
    "transform": "cr:transform",
}  # fmt: skip


def describe(frame: pandas.DataFrame, file: str, content: bytes, title: str) -> str:
    """The JSON-LD that describes a CSV of results. frame: its rows; file: its name; content: its bytes."""
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"numbers/{column}",
            "name": column,
            "description": COLUMNS.get(column, f"the label of the axis '{column}'"),
            "dataType": _type(frame[column]),
            "source": {"fileObject": {"@id": file}, "extract": {"column": column}},
        }
        for column in frame.columns
    ]
    document: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": title,
        "description": f"{len(frame)} numbers of {frame['cell'].nunique()} experiments of federated adversarial"
        f" training, each with what produced it; measured with fatbench {__version__}.",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "datePublished": str(frame["created"].max())[:10],
        "version": __version__,
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": file,
                "name": file,
                "contentUrl": file,
                "contentSize": f"{len(content)} B",
                "encodingFormat": "text/csv",
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        ],
        "recordSet": [{"@type": "cr:RecordSet", "@id": "numbers", "name": "numbers", "field": fields}],
    }
    return json.dumps(document, indent=2) + "\n"


def _type(values: pandas.Series[Any]) -> str:
    return {"f": "sc:Float", "i": "sc:Integer", "b": "sc:Boolean"}.get(values.dtype.kind, "sc:Text")
