//! The rank and the job of this process, as set by `torchrun`, and the connection to the other ranks.
//!
//! The environment variables are those of `torch.distributed`'s `init_method="env://"`
//! (`torch/distributed/rendezvous.py`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, ToSocketAddrs, UdpSocket};
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tch::Device;

use super::c10d::{Group, Interface, Store};
use super::gloo::Gloo;
use super::loss::{ENDED, Watch};
use super::nccl::{self, Nccl};
use super::{Alone, Collectives};
use crate::error::ranks;
use crate::{Error, Result};

/// The number of Gloo threads per process. With two, one operation can overtake another.
const THREADS: u32 = 2;
/// The interval at which a rank checks whether others have joined.
const POLL: Duration = Duration::from_millis(50);
/// The time that rank 0 keeps its store open after it has rejected the other ranks.
const LINGER: Duration = Duration::from_secs(1);
/// The time that connecting may exceed its limits before it counts as hanging, because c10d retries once after
/// a timeout.
const SLACK: Duration = Duration::from_secs(5);

/// The times that a rank waits for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// The maximum time until all ranks have joined.
    pub join: Duration,
    /// The maximum time of one operation.
    pub operation: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { join: Duration::from_secs(300), operation: Duration::from_secs(20) }
    }
}

/// The rank and the job of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The rank of this process: `RANK`, or 0.
    pub rank: u32,
    /// The number of ranks: `WORLD_SIZE`, or 1.
    pub world_size: u32,
    /// The rank among the ranks of this host: `LOCAL_RANK`, or 0.
    pub local_rank: u32,
    /// The number of ranks on this host: `LOCAL_WORLD_SIZE`, or 1.
    pub local_world_size: u32,
    /// The version of this program. Ranks of different versions cannot join.
    pub version: String,
    /// The address of the job's store; a job of one rank may have none.
    meeting: Option<Meeting>,
    /// The value of `GLOO_SOCKET_IFNAME`.
    interfaces: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Meeting {
    /// The value of `MASTER_ADDR`.
    host: String,
    /// The value of `MASTER_PORT`.
    port: u16,
    /// Whether rank 0 hosts the store, as opposed to the launcher: `TORCHELASTIC_USE_AGENT_STORE` is not
    /// `True`.
    hosted_by_rank_0: bool,
    /// The number of restarts of the job: `TORCHELASTIC_RESTART_COUNT`.
    restarts: u64,
}

/// The ranks of a job after they have joined.
#[derive(Debug)]
pub struct Joined {
    environment: Environment,
    timeouts: Timeouts,
    /// The connection to the other ranks; `None` for one rank.
    gloo: Option<Arc<Gloo>>,
}

/// Returns the value of an environment variable.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Parses a number from an environment variable.
fn number<T: FromStr>(variables: Variables<'_>, name: &str) -> Result<Option<T>> {
    let parse = |text: String| {
        text.trim().parse().map_err(|_| {
            let hint = "start the ranks with `torchrun`, or set the variables as it does";
            Error::ranks(format!("the environment variable {name} is not a number: {text:?}"), hint)
        })
    };
    variables(name).map(parse).transpose()
}

impl Environment {
    /// Reads the variables of this process. Without `RANK`, it is the only rank.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if variables are contradictory or missing.
    pub fn read() -> Result<Self> {
        Self::of(&|name| std::env::var(name).ok())
    }

    fn of(variables: Variables<'_>) -> Result<Self> {
        let interfaces = variables("GLOO_SOCKET_IFNAME").filter(|names| !names.is_empty());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let one = Self {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            version,
            meeting: None,
            interfaces,
        };
        let Some(rank) = number(variables, "RANK")? else { return Ok(one) };
        let missing = |name: &str| {
            let hint = "start the ranks with `torchrun` or `onefold-train launch`, or unset RANK to train on one rank";
            Error::ranks(format!("RANK is {rank}, but the environment variable {name} is not set"), hint)
        };
        let world_size = number(variables, "WORLD_SIZE")?.ok_or_else(|| missing("WORLD_SIZE"))?;
        let local_rank = number(variables, "LOCAL_RANK")?.unwrap_or(0);
        let local_world_size = number(variables, "LOCAL_WORLD_SIZE")?.unwrap_or(local_rank + 1);
        for (name, rank, size_name, size) in [
            ("RANK", rank, "WORLD_SIZE", world_size),
            ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
        ] {
            if rank >= size {
                let message = format!("{name} is {rank}, but {size_name} is {size}");
                return Err(Error::ranks(message, "ranks count from 0 to one less than their number"));
            }
        }
        let host = variables("MASTER_ADDR").filter(|host| !host.is_empty());
        let port: Option<u16> = number(variables, "MASTER_PORT")?;
        let agent = variables("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let meeting = match (host, port) {
            (Some(host), Some(port)) => {
                let restarts = number(variables, "TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
                Some(Meeting { host, port, hosted_by_rank_0: !agent, restarts })
            }
            _ if world_size == 1 => None,
            (None, _) => return Err(missing("MASTER_ADDR")),
            (_, None) => return Err(missing("MASTER_PORT")),
        };
        Ok(Self { rank, world_size, local_rank, local_world_size, meeting, ..one })
    }

    /// Returns whether a launcher has started this process as a rank, even as the only one.
    pub fn is_job(&self) -> bool {
        self.meeting.is_some()
    }

    /// Connects the ranks. All ranks must call it; it returns when all have joined.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the port is in use, if not all ranks join within `timeouts.join`, or if they have
    /// different versions, which rank 0 reports.
    pub fn join(&self, timeouts: Timeouts) -> Result<Joined> {
        let meeting = self.meeting.clone().filter(|_| self.world_size > 1);
        let gloo = meeting.map(|meeting| self.connect(&meeting, timeouts)).transpose()?;
        Ok(Joined { environment: self.clone(), timeouts, gloo })
    }

    /// Connects the ranks through Gloo.
    fn connect(&self, meeting: &Meeting, timeouts: Timeouts) -> Result<Arc<Gloo>> {
        let (environment, meeting) = (self.clone(), meeting.clone());
        let connect = move || environment.connect_here(&meeting, timeouts);
        self.bounded(timeouts.join + timeouts.operation + SLACK, connect).map(Arc::new)
    }

    /// Runs `connect` for at most `limit`. Calls of the store and of process groups can hang when another
    /// process hangs, so they run on a thread that may be left behind.
    fn bounded<T: Send + 'static>(
        &self,
        limit: Duration,
        connect: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new().name("rank-connect".to_owned()).spawn(move || {
            // After the limit, nothing receives the result.
            let _ = sender.send(connect());
        })?;
        receiver.recv_timeout(limit).unwrap_or_else(|_| {
            let message = format!("rank {} could not connect within {limit:?}", self.rank);
            Err(Error::ranks(message, "look at what the other ranks are doing"))
        })
    }

    fn connect_here(&self, meeting: &Meeting, timeouts: Timeouts) -> Result<Gloo> {
        let deadline = Instant::now() + timeouts.join;
        let listener = (meeting.hosted_by_rank_0 && self.rank == 0).then(|| meeting.listen()).transpose()?;
        let store = self.open_store(meeting, listener, timeouts.join)?;
        let unreachable = |message: String| meeting.unreachable(self.rank, &message);
        self.wait_for_others(&store, deadline).map_err(unreachable)??;
        let versions = self.versions(&store).map_err(unreachable)?;
        self.check_versions(&versions).inspect_err(|_| {
            if meeting.hosted_by_rank_0 && self.rank == 0 {
                // The other ranks read the versions now, from the store that ends with this rank.
                std::thread::sleep(LINGER);
            }
        })?;
        let ranks = (self.rank, self.world_size);
        let interface = self.interface(meeting);
        // All ranks are present. The others notice if one is lost from now on. The watch has its own connection
        // to the store, so that a blocked connection attempt does not delay it.
        let own = self.open_store(meeting, None, timeouts.join)?;
        let watch = Watch::start(store, ranks, meeting.hosted_by_rank_0)?;
        let group = Group::gloo(&own, ranks, &interface, THREADS, timeouts.operation).map_err(|message| {
            watch.fail(format!(
                "rank {} could not connect to the others: {}",
                self.rank,
                first_line(&message)
            ))
        })?;
        Ok(Gloo::new(group, watch, ranks, timeouts.operation))
    }

    /// Returns the interface at which other ranks reach this one: the configured one, or the one on the route
    /// to the store.
    fn interface(&self, meeting: &Meeting) -> Interface {
        if let Some(address) = meeting.loopback() {
            return Interface::Address(address.to_string());
        }
        if let Some(names) = &self.interfaces {
            return Interface::Names(names.clone());
        }
        let all_here = self.local_world_size == self.world_size;
        // Some machines resolve their own name to 127.0.1.1, which other machines cannot reach.
        match meeting.way().filter(|address| all_here || !address.is_loopback()) {
            Some(address) => Interface::Address(address.to_string()),
            None => Interface::OfHost,
        }
    }

    fn open_store(
        &self,
        meeting: &Meeting,
        listener: Option<TcpListener>,
        timeout: Duration,
    ) -> Result<Store> {
        // If each restart has its own store, the prefix is not needed, but harmless.
        let prefix = prefix(meeting.restarts);
        let host = meeting.loopback().map_or_else(|| meeting.host.clone(), |address| address.to_string());
        // c10d counts this limit in whole seconds.
        let timeout = timeout.max(Duration::from_secs(1));
        Store::open(&host, meeting.port, listener, &prefix, timeout)
            .map_err(|message| meeting.unreachable(self.rank, &message))
    }

    /// Announces this rank, and waits until all ranks are present.
    fn wait_for_others(&self, store: &Store, deadline: Instant) -> Result<Result<()>, String> {
        store.set(&version_key(self.rank), self.version.as_bytes())?;
        if store.add(&joined_key(self.rank), 1)? > 1 {
            let message = format!("two processes of the job have the rank {}", self.rank);
            let hint =
                "give every process of a job a RANK of its own, and every job a MASTER_PORT of its own";
            return Ok(Err(Error::ranks(message, hint)));
        }
        let mut missing: Vec<u32> = (0..self.world_size).collect();
        loop {
            let mut present = Vec::new();
            for &rank in &missing {
                if store.has(&joined_key(rank))? {
                    present.push(rank);
                }
            }
            missing.retain(|rank| !present.contains(rank));
            let Some((first, others)) = missing.split_first() else { return Ok(Ok(())) };
            if let Some(rank) = store.get(ENDED)? {
                let rank = String::from_utf8_lossy(&rank).parse().unwrap_or(*first);
                return Ok(Err(Error::ReportedElsewhere { rank, reporter: rank }));
            }
            if Instant::now() >= deadline {
                let message = format!("{} missing: not all ranks joined in time", ranks(*first, others));
                return Ok(Err(Error::ranks(
                    message,
                    "look at why they did not start, or did not find MASTER_ADDR",
                )));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Returns the versions of all ranks, which must be present.
    fn versions(&self, store: &Store) -> Result<Vec<String>, String> {
        let of_rank = |rank: u32| {
            let version = store.get(&version_key(rank))?.unwrap_or_default();
            Ok(String::from_utf8_lossy(&version).into_owned())
        };
        (0..self.world_size).map(of_rank).collect()
    }

    /// Rejects ranks with another version than rank 0, which reports it.
    fn check_versions(&self, versions: &[String]) -> Result<()> {
        let other = versions.iter().position(|version| *version != versions[0]);
        match other {
            None => Ok(()),
            Some(rank) if self.rank == 0 => {
                let (version, first) = (&versions[rank], &versions[0]);
                let message =
                    format!("rank {rank} runs version {version:?} of the program, rank 0 {first:?}");
                Err(Error::ranks(message, "install one version of Onefold on all hosts"))
            }
            Some(_) => Err(Error::ReportedElsewhere { rank: 0, reporter: 0 }),
        }
    }
}

/// Returns the prefix of a job's keys in its store.
pub(super) fn prefix(restarts: u64) -> String {
    format!("/worker/attempt_{restarts}/onefold")
}

/// Returns the key of a rank that has joined.
pub(super) fn joined_key(rank: u32) -> String {
    format!("joined/{rank}")
}

/// Returns the key of a rank's version.
fn version_key(rank: u32) -> String {
    format!("version/{rank}")
}

impl Joined {
    /// Returns the rank and the job of this process.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// Returns the collectives for tensors in main memory.
    pub fn collectives(&self) -> Arc<dyn Collectives> {
        match &self.gloo {
            Some(gloo) => Arc::clone(gloo) as Arc<dyn Collectives>,
            None => Arc::new(Alone),
        }
    }

    /// Returns collectives for tensors in main memory and on GPUs; `device` is the GPU of this rank. All ranks
    /// must call it, after each has opened its GPU. A job of one rank needs it only to check NCCL, and must
    /// have a store, too.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the NCCL library is missing, or the GPUs cannot connect.
    pub fn on_device(&self, device: Device) -> Result<Arc<dyn Collectives>> {
        let Self { environment, timeouts, gloo } = self;
        let Device::Cuda(number) = device else { return Ok(self.collectives()) };
        let Some(meeting) = &environment.meeting else {
            let hint = "start it with `onefold-train launch --ranks 1 --`, or with `torchrun`";
            return Err(Error::ranks("NCCL needs a job, also for one rank".to_owned(), hint));
        };
        let gloo = gloo.clone().map_or_else(|| environment.connect(meeting, *timeouts), Ok)?;
        let on_host: &dyn Collectives = &*gloo;
        let shim = on_host.agree(nccl::load())?;
        let (ranks, own, place, timeouts) =
            ((gloo.rank(), gloo.size()), environment.clone(), meeting.clone(), *timeouts);
        let connect = move || {
            let store = own.open_store(&place, None, timeouts.join)?;
            let group = Group::nccl(&shim, &store, ranks, number, timeouts.operation);
            group.map_err(|message| {
                let message = format!("NCCL cannot connect rank {}: {}", ranks.0, first_line(&message));
                let hint = "give every rank a GPU of its own; NCCL_DEBUG=INFO says more, and NCCL_SOCKET_IFNAME names the network";
                Error::ranks(message, hint)
            })
        };
        let group = environment.bounded(timeouts.join + SLACK, connect)?;
        Ok(Arc::new(Nccl::new(gloo, group, device)?))
    }
}

impl Meeting {
    /// Returns the host's address if it is a loopback address.
    fn loopback(&self) -> Option<IpAddr> {
        if self.host == "localhost" {
            return Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        self.host.parse().ok().filter(IpAddr::is_loopback)
    }

    /// Returns the address of this machine from which packets to the store are sent.
    fn way(&self) -> Option<IpAddr> {
        let store = (self.host.as_str(), self.port).to_socket_addrs().ok()?.next()?;
        let any: IpAddr =
            if store.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Nothing is sent: connecting a datagram socket only looks up the route.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(store).ok()?;
        Some(socket.local_addr().ok()?.ip())
    }

    /// Listens at the address of the store.
    fn listen(&self) -> Result<TcpListener> {
        let bound = match self.loopback() {
            Some(address) => TcpListener::bind((address, self.port)),
            None => {
                TcpListener::bind((Ipv6Addr::UNSPECIFIED, self.port)).or_else(|error| match error.kind() {
                    std::io::ErrorKind::AddrInUse => Err(error),
                    _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port)),
                })
            }
        };
        bound.map_err(|error| {
            let message = format!("rank 0 cannot listen at {}:{}: {error}", self.host, self.port);
            Error::ranks(
                message,
                "choose another MASTER_PORT, the same on all ranks: another job may use this one",
            )
        })
    }

    fn unreachable(&self, rank: u32, message: &str) -> Error {
        let place = format!("{}:{}", self.host, self.port);
        let message = format!("rank {rank} cannot reach the job's store at {place}: {}", first_line(message));
        let hint = if self.hosted_by_rank_0 {
            "start rank 0, which hosts the store, and give all ranks the same MASTER_ADDR and MASTER_PORT"
        } else {
            "see whether what started the ranks still runs"
        };
        Error::ranks(message, hint)
    }
}

fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Environment> {
        let value = |name: &str| {
            let variable = variables.iter().find(|(known, _)| *known == name);
            variable.map(|(_, value)| (*value).to_owned())
        };
        Environment::of(&value)
    }

    const FULL: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

    #[test]
    fn without_rank_there_is_one() {
        let environment = of(&[("WORLD_SIZE", "4")]).unwrap();
        assert_eq!((environment.rank, environment.world_size, environment.meeting), (0, 1, None));
    }

    #[test]
    fn the_variables_of_torchrun_are_read() {
        let more = [
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "3"),
            ("LOCAL_RANK", "1"),
        ];
        let environment = of(&[&FULL[..], &more[..]].concat()).unwrap();
        assert_eq!((environment.rank, environment.world_size), (1, 2));
        assert_eq!((environment.local_rank, environment.local_world_size), (1, 2));
        let meeting = environment.meeting.unwrap();
        assert_eq!((meeting.port, meeting.hosted_by_rank_0, meeting.restarts), (29500, false, 3));
        assert!(of(&FULL).unwrap().meeting.unwrap().hosted_by_rank_0);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for missing in ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let rest: Vec<_> = FULL.into_iter().filter(|(name, _)| *name != missing).collect();
            let error = of(&rest).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("RANK is 1, but the environment variable {missing} is not set"))
            );
        }
        for (name, value, expected) in [
            ("RANK", "one", "RANK is not a number: \"one\""),
            ("RANK", "2", "RANK is 2, but WORLD_SIZE is 2"),
            ("MASTER_PORT", "70000", "MASTER_PORT is not a number"),
        ] {
            let changed = FULL.map(|(known, old)| (known, if known == name { value } else { old }));
            let error = of(&changed).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_rank_that_is_lost_while_all_connect_is_named_once() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let timeout = Duration::from_secs(60);
        let store = Store::open("127.0.0.1", port, Some(listener), &prefix(0), timeout).unwrap();
        let environment = |rank: &str| {
            let own = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")];
            let port = port.to_string();
            let all = [
                &own[..],
                &[
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", &port),
                    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ],
            ];
            of(&all.concat()).unwrap()
        };
        // Rank 1 joins, and dies before it connects.
        store.set(&version_key(1), environment("1").version.as_bytes()).unwrap();
        store.add(&joined_key(1), 1).unwrap();
        let join = |rank: &'static str| {
            let environment = environment(rank);
            std::thread::spawn(move || {
                let timeouts = Timeouts { join: timeout, operation: Duration::from_secs(2) };
                environment.join(timeouts).map(drop).unwrap_err()
            })
        };
        let [reporter, other] = [join("0"), join("2")].map(|rank| rank.join().unwrap());
        let text = reporter.to_string();
        assert!(matches!(reporter, Error::RankLost(_)) && text.starts_with("rank 1 was lost"), "{text}");
        assert!(text.contains("could not connect to the others"), "{text}");
        assert!(matches!(other, Error::ReportedElsewhere { rank: 1, reporter: 0 }), "{other}");
    }

    #[test]
    fn ranks_listen_where_the_others_can_reach_them() {
        let interface = |variables: &[(&str, &str)], host: &str| {
            let full = FULL.map(|(name, value)| (name, if name == "MASTER_ADDR" { host } else { value }));
            let environment = of(&[&full[..], variables].concat()).unwrap();
            environment.interface(environment.meeting.as_ref().unwrap())
        };
        let here = |interface| matches!(interface, Interface::Address(address) if address == "127.0.0.1");
        assert!(here(interface(&[], "localhost")));
        let named = interface(&[("GLOO_SOCKET_IFNAME", "eth7")], "192.0.2.1");
        assert!(matches!(named, Interface::Names(names) if names == "eth7"));
        // Addresses from the range for documentation. They may have a route, but they are not addresses of this
        // machine.
        assert!(!here(interface(&[("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")], "192.0.2.1")));
    }
}
