"""Where contacts come from: addresses, names with one or many records, a shared directory, a Slurm node list.

Flows in: contact texts and, each time they are read, the world (resolver, directory, environment). Flows out: addresses
(IP literals with a port) and a sentence for each contact that gave none.
Invariants: reading never raises for what the world answers; a contact that fails now may work the next time; one that
takes long to read holds up no other.
Limits: a resolver may take long, so `ContactReader` reads on threads of its own and never on the node's.
A node tells others one address, of the family in which a contact on another host is reached: where some speak IPv4 only
and others IPv6 only, they do not meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rendezvous.config import check_contact, split_endpoint
from rendezvous.interfaces import only_host
from rendezvous.types import RendezvousError, address_from, join_address, split_address

_MAX_FILES = 4096
_MAX_HOSTS = 65536
_EVERYWHERE = ("0.0.0.0", "::", "*")


def resolve(host: str, port: int) -> list[str]:
    """Every address of `host`; OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = [str(entry[4][0]) for entry in found if "%" not in str(entry[4][0])]
    if not hosts:
        raise OSError("only link-local addresses, which mean nothing on other hosts")
    return list(dict.fromkeys(join_address(host, port) for host in hosts))


def read_contacts(contacts: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """-> (addresses without repetition, problems). Blocks as long as the resolver does for the slowest of them."""
    return _merged(_read_each(contacts, os.environ if env is None else env))


def _read_each(contacts: Sequence[str], env: Mapping[str, str]) -> list[_Reading]:
    """All at once."""
    readings = [_Reading(contact, env) for contact in contacts]
    slow = [reading for reading in readings if not is_literal(reading.contact)]
    # Daemons: a resolver can hang for longer than anybody wants to wait at exit.
    threads = [threading.Thread(target=reading.read, name="rendezvous-resolve", daemon=True) for reading in slow[1:]]
    for thread in threads:
        thread.start()
    for reading in readings:
        if reading not in slow[1:]:
            reading.read()
    for thread in threads:
        thread.join()
    return readings


class _Reading:
    """One contact, and what it said when it was read last."""

    def __init__(self, contact: str, env: Mapping[str, str]) -> None:
        self.contact = contact
        self._env = env
        self.addresses_or_problem: list[str] | str = []

    def read(self) -> None:
        """From any thread: the result changes in one go."""
        try:
            self.addresses_or_problem = _read_one(self.contact, self._env)
        except (OSError, ValueError) as error:
            self.addresses_or_problem = f"{self.contact}: {error}"


def _merged(readings: Sequence[_Reading]) -> tuple[list[str], list[str]]:
    found = [reading.addresses_or_problem for reading in readings]
    addresses = dict.fromkeys(address for each in found if isinstance(each, list) for address in each)
    return list(addresses), [each for each in found if isinstance(each, str)]


def _read_one(contact: str, env: Mapping[str, str]) -> list[str]:
    check_contact(contact)
    kind, _, rest = contact.partition(":")
    if kind == "dir":
        return _read_directory(Path(rest))
    if kind == "slurm":
        return [address for host in _slurm_hosts(env) for address in resolve(host, int(rest))]
    host, port = split_endpoint(contact, "contact")
    return resolve(host, port)


def _slurm_hosts(env: Mapping[str, str]) -> list[str]:
    """The nodes of the job: of all components of a heterogeneous one, each of which may run a step of its own."""
    names = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    lists = [next((env[name] for name in names if env.get(name)), "")]
    lists += [value for name, value in sorted(env.items()) if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
    found = list(dict.fromkeys(host for listed in lists if listed for host in expand_hosts(listed)))
    if not found:
        raise ValueError("SLURM_JOB_NODELIST is not set: this is no Slurm job step")
    return found


def _read_directory(directory: Path) -> list[str]:
    found = []
    for path in sorted(directory.iterdir())[:_MAX_FILES]:
        if path.suffix == ".address" and path.is_file():  # opening a pipe would wait for its other end
            try:
                with path.open("rb") as file:
                    found.append(address_from(file.read(64).decode("ascii").strip()))
            except (OSError, ValueError):
                continue  # deleted meanwhile, half written, or not ours: it is read again
    return found


def publish(contacts: Sequence[str], name: str, address: str) -> None:
    """Leave the own address in every shared directory among the contacts; RendezvousError if one cannot be written."""
    file_name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: f"%{ord(match[0]):x}", name) + ".address"
    for contact in contacts:
        kind, _, rest = contact.partition(":")
        if kind != "dir":
            continue
        try:
            Path(rest).mkdir(parents=True, exist_ok=True)
            half = Path(rest) / f"{file_name}.{os.getpid()}.new"
            half.write_text(address)
            half.replace(Path(rest) / file_name)
        except OSError as error:
            raise RendezvousError(
                f"the own address cannot be written to the contact directory {rest} ({error}): other nodes would not "
                "find this one. Make the directory writable, or list addresses instead"
            ) from error


def expand_hosts(listed: str) -> list[str]:
    """A Slurm node list, "a[01-03,7],b", -> its host names. ValueError for what is none."""
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", listed)):
        raise _no_node_list(listed, "a bracket is without the other one")
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", listed):  # not at commas within brackets
        hosts += _expand_name(listed, part)
        if len(hosts) > _MAX_HOSTS:
            raise _no_node_list(listed, f"it names more than {_MAX_HOSTS} hosts")
    return hosts


def _expand_name(listed: str, part: str) -> list[str]:
    """One name, with any number of brackets, which count like digits: the last one fastest."""
    if not part or re.search(r"\s", part):
        raise _no_node_list(listed, "a name is empty or has a space in it; names stand between single commas")
    found = [""]
    for text, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
        ends = [text]
        if not text:
            ends = [end for item in ranges.split(",") for end in _expand_range(listed, item)]
        if len(found) * len(ends) > _MAX_HOSTS:
            raise _no_node_list(listed, f"it names more than {_MAX_HOSTS} hosts")
        found = [start + end for start in found for end in ends]
    return found


def _expand_range(listed: str, item: str) -> list[str]:
    """The numbers of 08-10 are 08, 09 and 10: with as many digits as the first one."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
    first, last = match.groups(default=match[1]) if match else ("1", "0")
    if not 0 <= int(last) - int(first) < _MAX_HOSTS:
        raise _no_node_list(
            listed, f"{item!r} in its brackets is no number and no rising range of at most {_MAX_HOSTS}"
        )
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _no_node_list(listed: str, why: str) -> ValueError:
    shown = listed if len(listed) <= 80 else f"{listed[:80]}..."
    return ValueError(f"{shown!r} is no Slurm node list: {why}")


def bind_address(host: str, port: int) -> str:
    """Where to listen for `host`: a name stands for the first of its addresses, which is the one others are told."""
    try:
        return join_address(host, port) if host in _EVERYWHERE else resolve(host, port)[0]
    except (OSError, IndexError):
        return join_address(host, port)  # whoever listens there says what is wrong with it


def own_address(bind: str, advertise: str | None, port: int, contacts: Sequence[str]) -> str:
    """The address to tell others for a socket bound to `port`; RendezvousError if it cannot be found out."""
    host, wanted = split_endpoint(advertise or bind, "advertise" if advertise else "bind", any_port=True)
    port = wanted or port
    if host in _EVERYWHERE:
        return join_address(_outgoing_host(contacts, only_v4=host == "0.0.0.0"), port)
    try:
        return address_from(resolve(host, port)[0])
    except (OSError, IndexError, ValueError) as error:
        raise RendezvousError(
            f"the own address {host!r} does not resolve ({error}): others cannot reach this node. "
            "Give an IP address with bind or advertise"
        ) from error


def _outgoing_host(contacts: Sequence[str], *, only_v4: bool) -> str:
    """The local address from which a contact is reached. Sends nothing. Never loopback, if a contact is elsewhere.
    Who listens at 0.0.0.0 is not reached over IPv6, who listens at [::] over both.

    A host that is its own first contact learns nothing from it (its own name may well mean 127.0.1.1 here), so
    contacts on other hosts are asked first, then the host's own name, and at last the default route and the
    interfaces. A run whose contacts are loopback by their name stays on loopback.
    """

    def usable(addresses: list[str]) -> list[str]:
        return [address for address in addresses if not (only_v4 and is_v6(address))]

    read, problems = read_contacts(contacts)
    addresses = usable(read)
    on_loopback = usable(read_contacts([contact for contact in contacts if names_loopback(contact)])[0])
    if addresses and addresses == on_loopback:
        return split_address(addresses[0])[0]
    local = {address: is_local(split_address(address)[0]) for address in addresses}
    for address in sorted(addresses, key=lambda address: local[address]):
        found = _host_towards(*split_address(address))
        if found:
            return found
    try:
        own = [split_address(address)[0] for address in usable(resolve(socket.gethostname(), 1))]
    except OSError as error:
        problems.append(str(error))
        own = []
    for found in own:
        if not ipaddress.ip_address(found).is_loopback:
            return found
    if read and not addresses:
        problems.append("0.0.0.0 is reached over IPv4 only and the contacts over IPv6 only: bind [::]")
    elif host := _default_route_host(only_v4=only_v4) or only_host(only_v4=only_v4):
        return host
    raise RendezvousError(
        "bind names every interface, and no address was found under which other hosts reach this one "
        f"({'; '.join(problems) or 'only loopback addresses'}). Give one with advertise"
    )


def _host_towards(host: str, port: int) -> str:
    """The local address from which `host` is reached; empty if that is loopback or there is no way. Sends nothing."""
    try:
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            found = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if ipaddress.ip_address(found).is_loopback else found


def _default_route_host(*, only_v4: bool) -> str:
    """The local address that leads elsewhere, by the example of addresses that nobody has (RFC 5737, RFC 3849)."""
    return _host_towards("192.0.2.1", 9) or ("" if only_v4 else _host_towards("2001:db8::1", 9))


def is_local(host: str) -> bool:
    """Does this address (an IP literal) belong to this host? [::] does where there is IPv6 at all."""
    try:
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def local_binds(contacts: Sequence[str]) -> list[str]:
    """Where an agent that was told nothing but the contacts listens, best first: where the contacts name this host.

    The last one always works: any port, on every interface unless all contacts are loopback. A name that means loopback
    here but is no loopback name (127.0.1.1 for the own host name) stands for every interface, and so does one that has
    several addresses of this host: others may reach only one of them, and not the same.
    """
    found: list[str] = []
    # A contact that names nobody yet may name other hosts later.
    only_loopback, v6 = all(map(names_loopback, contacts)), False
    for reading in _read_each(contacts, os.environ):
        named_loopback = names_loopback(reading.contact)
        here = []
        for address in _merged([reading])[0]:
            host, port = split_address(address)
            loopback = ipaddress.ip_address(host).is_loopback
            v6 = v6 or (is_v6(address) and (not named_loopback or is_literal(reading.contact)))
            if loopback and not named_loopback:
                here.append(join_address("::" if is_v6(address) else "0.0.0.0", port))
            elif is_local(host):
                here.append(address)
        if len(here) > 1 and not named_loopback:
            here.insert(0, join_address("::" if any(map(is_v6, here)) else "0.0.0.0", split_address(here[0])[1]))
        found += here
    everywhere, loopback_host = ("::", "::1") if v6 and is_local("::") else ("0.0.0.0", "127.0.0.1")
    return [*dict.fromkeys(found), join_address(loopback_host if only_loopback else everywhere, 0)]


def names_loopback(contact: str) -> bool:
    """Whatever host reads it: not so a host's own name, which may resolve to loopback there and only there."""
    if is_literal(contact):
        return ipaddress.ip_address(split_address(contact)[0]).is_loopback
    return contact.rpartition(":")[0] == "localhost"


def is_v6(address: str) -> bool:
    return address.startswith("[")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_literal(contact: str) -> bool:
    """Can this contact be read without waiting for anybody?"""
    try:
        split_address(contact)
    except ValueError:
        return False
    return True


class ContactReader:
    """Reads each contact again and again on a thread of its own, and reports all that is known whenever it changes.

    Owned by one node; `close` ends the threads.
    """

    def __init__(
        self, contacts: Sequence[str], interval_s: float, report: Callable[[list[str], list[str]], None]
    ) -> None:
        self._readings = [_Reading(contact, os.environ) for contact in contacts]
        self._interval_s = interval_s
        self._report = report
        self._reported: tuple[list[str], list[str]] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(reading,), name="rendezvous-contacts", daemon=True)
            for reading in self._readings
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, reading: _Reading) -> None:
        while True:
            reading.read()
            with self._lock:
                found = _merged(self._readings)
                if found != self._reported:
                    self._reported = found
                    self._report(*found)
            if is_literal(reading.contact) or self._stop.wait(self._interval_s):
                return

    def close(self) -> None:
        self._stop.set()
