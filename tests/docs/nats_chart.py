"""What the official NATS chart, 1.x, makes of values: nats.conf. By its templates, for what `deploy` sets.

`helm template` is the real thing, and this page of it is for machines without one: `files/config/*.yaml` of the chart,
merged with what `merge` says, keys in order, `<< … >>` bare, and `…$include` as the server's own directive.
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
"""Values of the chart, as its values.yaml has them. Helm takes any other without a word, so it would do nothing."""
_FREE = ("merge", "env", "topologySpreadConstraints")
"""Below them stands what is somebody else's: the server's, Kubernetes'."""
CERTIFICATES = "/etc/nats-certs"
CA = "/etc/nats-ca-cert/ca.crt"


def named(values: dict[str, Any], above: str = "") -> set[str]:
    """Which of the chart's values these set."""
    found: set[str] = set()
    for key, value in values.items():
        path = f"{above}{key}"
        found |= named(value, f"{path}.") if isinstance(value, dict) and key not in _FREE else {path}
    return found


def nats_conf(values: dict[str, Any], release: str = "nats") -> str:
    """The chart's nats.conf for these values."""
    config = values["config"]
    count = config["cluster"]["replicas"]
    made: dict[str, Any] = {
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
    text = json.dumps(made, indent=2, sort_keys=True)
    return re.sub(r'"<<\s+(.*)\s+>>"', r"\1", re.sub(r'".*\$include": "(.*)",?', r"include \1;", text))


def _tls(protocol: str) -> dict[str, str]:
    folder = f"{CERTIFICATES}/{protocol}"
    return {"cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key", "ca_file": CA}
