"""One network name space a node, each with a cable to one bridge on the host."""

from __future__ import annotations

from slurm.processes import run, succeeds
from slurm.settings import ClusterError, Settings


class Network:
    """Bridge, name spaces and cables of one cluster, named after its port."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bridge = f"scbr{settings.port}"

    def namespace(self, node: str) -> str:
        return f"sc{self._settings.port}-{node}"

    def up(self) -> None:
        """Make all of it that is missing.

        Raises:
            ClusterError: not allowed here, or another network has the addresses.
        """
        settings = self._settings
        for line in self._ip("-o", "-4", "addr", "show").splitlines():
            if f" {settings.net}." in line and self._bridge not in line:
                raise ClusterError(
                    f"{line.split()[1]} already has addresses {settings.net}.*: "
                    "set SC_NET to three other numbers, such as 10.80.0"
                )
        if not self._has("link", self._bridge):
            self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("addr", "replace", f"{settings.host_address}/24", "dev", self._bridge)
        self._ip("link", "set", self._bridge, "up")
        for node in settings.node_names:
            space, cable = self.namespace(node), self._cable(node)
            if not self._has("netns", space):
                self._ip("netns", "add", space)
            if not self._has("link", cable):
                self._ip(
                    *("link", "add", cable, "type", "veth", "peer", "name", "eth0"),
                    *("netns", space),
                )
                self._ip("link", "set", cable, "master", self._bridge)
                address = f"{settings.node_address(node)}/24"
                self._ip("-n", space, "addr", "add", address, "dev", "eth0")
            self.heal(node)
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "route", "replace", "default", "via", settings.host_address)

    def down(self) -> None:
        """Remove all of it that is there."""
        for node in self._settings.node_names:
            if self._has("link", self._cable(node)):
                self._ip("link", "del", self._cable(node))
            if self._has("netns", self.namespace(node)):
                self._ip("netns", "del", self.namespace(node))
        if self._has("link", self._bridge):
            self._ip("link", "del", self._bridge)

    def cut(self, node: str) -> None:
        """Pull the node's cable: what runs on it goes on, and reaches nobody."""
        self._ip("link", "set", self._cable(node), "down")

    def heal(self, node: str) -> None:
        """Plug it in again."""
        self._ip("link", "set", self._cable(node), "up")

    def _cable(self, node: str) -> str:
        return f"scv{self._settings.port}n{node.removeprefix('node')}"

    def _has(self, kind: str, name: str) -> bool:
        if kind == "netns":
            return any(
                line.split()[:1] == [name] for line in self._ip("netns", "list").splitlines()
            )
        return succeeds(["ip", "link", "show", name], self._settings.daemon_environ)

    def _ip(self, *words: str) -> str:
        return run(["ip", *words], self._settings.daemon_environ)
