"""Make nats.conf of values as the official NATS chart, 1.x, does, for the values that `deploy` sets.

`helm template` is the real program; this module is for machines without it. It follows `files/config/*.yaml` of the
chart: merged with `merge`, keys in order, `<< … >>` bare, and `…$include` as the server's own directive.
"""

from __future__ import annotations

import json
import re
from typing import Any

KNOWN = {
    "config.cluster.enabled",
    "config.cluster.replicas",
    "config.cluster.tls.enabled",
    "config.cluster.tls.secretName",
    "config.nats.tls.enabled",
    "config.nats.tls.secretName",
    "config.jetstream.enabled",
    "config.jetstream.fileStore.pvc.enabled",
    "config.jetstream.fileStore.pvc.size",
    "config.jetstream.merge",
    "config.monitor.enabled",
    "config.monitor.port",
    "config.merge",
    "tlsCA.enabled",
    "tlsCA.secretName",
    "container.image.tag",
    "container.env",
    "container.merge",
    "podTemplate.topologySpreadConstraints",
    "natsBox.enabled",
}
"""Values of the chart, as its values.yaml has them. Helm accepts any other silently, and it would do nothing."""
_FREE = ("merge", "env", "topologySpreadConstraints")
"""Values below these belong to the server or to Kubernetes."""
CERTIFICATES = "/etc/nats-certs"
CA = "/etc/nats-ca-cert/ca.crt"


def named(values: dict[str, Any], above: str = "") -> set[str]:
    """Return the names of the chart's values that are set."""
    names: set[str] = set()
    for key, value in values.items():
        path = f"{above}{key}"
        names |= named(value, f"{path}.") if isinstance(value, dict) and key not in _FREE else {path}
    return names


def nats_conf(values: dict[str, Any], release: str = "nats") -> str:
    """Return the chart's nats.conf for these values."""
    config = values["config"]
    count = config["cluster"]["replicas"]
    conf: dict[str, Any] = {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "pid_file": "/var/run/nats/nats.pid",
        "port": 4222,
        "tls": _tls("nats"),
        "cluster": {
            "name": release,
            "port": 6222,
            "no_advertise": True,
            "routes": [f"tls://{release}-{number}.{release}-headless:6222" for number in range(count)],
            "tls": _tls("cluster"),
        },
        "http_port": config["monitor"]["port"],
        "jetstream": {
            "max_memory_store": 0,
            "store_dir": "/data",
            "max_file_store": f"<< {config['jetstream']['fileStore']['pvc']['size']} >>",
            **config["jetstream"]["merge"],
        },
        **config["merge"],
    }
    text = json.dumps(conf, indent=2, sort_keys=True)
    return re.sub(r'"<<\s+(.*)\s+>>"', r"\1", re.sub(r'".*\$include": "(.*)",?', r"include \1;", text))


def _tls(protocol: str) -> dict[str, str]:
    folder = f"{CERTIFICATES}/{protocol}"
    return {"cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key", "ca_file": CA}
