"""Sets of values for tests of the Helm chart."""

from __future__ import annotations

from typing import Any, Final

BUNDLE: Final = "LS0tLS1CRUdJTg=="
REDIS: Final = {"planner": {"store": {"redis": {"url": "redis://redis:6379/0"}}}}
MONITORED: Final = {
    "monitoring": {name: {"enabled": True, "labels": {"release": "prometheus"}} for name in ("serviceMonitor", "rules")}
}
VALUE_SETS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "redis": REDIS,
    "redis of a new format": {"planner": {**REDIS["planner"], "recreate": True}},
    "redis in a Secret": {"planner": {"store": {"redis": {"existingSecret": "redis", "existingSecretKey": "u"}}}},
    "integrations in the planner": {
        "planner": {"integrations": ["webhook", "controller", "scaler"]},
        "keda": {"enabled": True},
    },
    "KEDA, monitored": {"keda": {"enabled": True, "replicas": 2}, **MONITORED},
    "cert-manager": {
        "planner": {"tls": {"enabled": True, "certManager": {"enabled": True, "dnsNames": ["planner.example"]}}},
        "webhook": {"certificates": {"mode": "certManager"}},
        **MONITORED,
    },
    "cert-manager's own issuer, mTLS": {
        "planner": {
            "tls": {
                "enabled": True,
                "clientCertificates": True,
                "certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}},
            },
            "integrations": ["controller"],
        },
        "webhook": {"certificates": {"mode": "certManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}},
        "keda": {"enabled": True},
        **MONITORED,
    },
    "existing Secrets": {
        "planner": {
            "auth": {"existingSecret": "tokens"},
            "tls": {"enabled": True, "existingSecret": "tls"},
            "store": {"redis": {"existingSecret": "redis"}},
        },
        "webhook": {"certificates": {"mode": "secret", "existingSecret": "webhook"}, "caBundle": BUNDLE},
        "instances": {"tlsSecret": "instances-tls", "injectionMode": "none"},
    },
    "open": {"planner": {"auth": {"enabled": False}}, "networkPolicy": {"enabled": False}},
    "open, with Redis": {**REDIS, "planner": {**REDIS["planner"], "auth": {"enabled": False}}},
    "external planner": {
        "planner": {"enabled": False, "url": "https://planner.example", "auth": {"existingSecret": "tokens"}},
        "keda": {"enabled": True},
    },
    "external webhook": {"webhook": {"url": "https://192.0.2.1:9443/", "caBundle": BUNDLE}},
    "planner only": {"webhook": {"enabled": False}, "controller": {"enabled": False}},
    "instance network policy": {
        "networkPolicy": {
            "instances": {"enabled": True, "extraPorts": [{"port": 15000, "endPort": 17000}]},
        },
    },
    "no topology, no roles": {
        "webhook": {"topology": {"enabled": False}, "hostNetwork": True},
        "rbac": {"create": False},
        "monitoring": {"dashboard": {"enabled": False}},
    },
    "many namespaces": {
        "instances": {"namespaces": ["team-a", "team-b"], "injectionMode": "init", "injectionImage": "rfork-files:1"},
        "networkPolicy": {
            "instances": {
                "enabled": True,
                "enginePorts": [8000, 30000],
                "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            },
            "plannerFrom": [{"namespaceSelector": {"matchLabels": {"role": "operators"}}}],
        },
    },
    "holders": {"holder": {"enabled": True, "image": "engine:1", "models": ["org/llama", "qwen"]}},
    "holders of two namespaces, TLS": {
        "holder": {
            "enabled": True,
            "image": "engine:1",
            "memoryGiB": 256,
            "nodeSelector": {"gpu": "h100"},
            "priorityClassName": "low",
            "pullSecrets": [{"name": "registry"}],
            "updateStrategy": {"type": "OnDelete"},
            "extraEnv": [{"name": "A", "value": "b"}],
        },
        "instances": {"namespaces": ["team-a", "team-b"], "injectionMode": "none", "tlsSecret": "instances-tls"},
        "networkPolicy": {"instances": {"enabled": True, "enginePorts": [8000]}},
    },
    "all Pod options": {
        "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "registry"}]},
        "pods": {
            "annotations": {"a": "1"},
            "labels": {"b": "2"},
            "nodeSelector": {"role": "control"},
            "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "priorityClassName": "system-cluster-critical",
        },
        "planner": {
            "settings": {"max_requests_per_s": 8 << 20, "lease_ttl_s": 0.5},
            "extraEnv": [{"name": "A", "value": "b"}],
            "podAnnotations": {"a": "3"},
            "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
        },
        "serviceAccounts": {"annotations": {"role": "none"}},
        "webhook": {"extraEnv": [{"name": "A", "value": "b"}]},
        "controller": {"extraEnv": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
        "keda": {"enabled": True, "extraEnv": [{"name": "A", "value": "b"}]},
    },
}
