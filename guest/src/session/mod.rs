//! A session: one context on the host, its commands one at a time.
#![forbid(unsafe_code)]

mod error;
mod extension;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
mod transfer;

pub use error::{LoadFailure, SessionError};

use crate::link::{self, Blob, Link, LinkError, Process, Route, wait};
use crate::text::plain;
use apir_protocol::codec::{DecodeError, Decoder, EncodeError, Encoder};
use apir_protocol::command::{Command, CommandType};
use apir_protocol::constants::{
    COMMAND_CAPACITY, DATA_BLOB_SIZE, FEATURE_REASONS, FORWARD_BASE, HANDSHAKE_MAGIC, PROTOCOL_MAJOR,
    PROTOCOL_MINOR, REASON_BYTES, REPLY_BLOB_SIZE,
};
use apir_protocol::header::{CommandHeader, HEADER_SIZE};
use apir_protocol::messages::{DeviceGetPropsReply, DeviceGetPropsRequest};
use apir_protocol::{Request, Wire};
use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(2);
/// Loading a GPU's libraries and starting its driver takes long on a cold machine.
const LOAD_LIBRARY_DEADLINE: Duration = Duration::from_secs(60);
/// Environment variable with the milliseconds after which a silent host is given up: 10,000 where it gives signs of life. Where
/// it gives none, its answer is what counts, and without the variable a command may compute for ever.
pub const TIMEOUT_VARIABLE: &str = "APIR_TIMEOUT_MS";
/// Bytes of the notification word in front of a reply.
const NOTIFICATION_SIZE: usize = 4;
/// Bytes of a reply that are read at first: all but texts are shorter.
const SHORT_REPLY: usize = 256;
/// What the bytes of a reply are that a host does not write.
const UNANSWERED: u8 = 0xff;
const WHOLE_REPLY: usize = REPLY_BLOB_SIZE as usize - NOTIFICATION_SIZE;

/// One context on a host, with its plugin loaded. May be used from several threads; commands take turns.
///
/// It belongs to the process that opened it: in a fork of that process every call fails at once, and nothing is sent, not even when it is dropped.
#[derive(Debug)]
pub struct Session {
    // Declared before `link`: blobs go back to the host while it can be told.
    channel: Mutex<Channel>,
    liveness: Option<Arc<Blob>>,
    link: Box<dyn Link>,
    process: Process,
    lost: OnceLock<String>,
    counters: Counters,
    host_version: OnceLock<(u32, u32)>,
    /// What both sides have beyond upstream's commands; none with a host that is not of this project.
    features: Option<u64>,
    deadline: Option<Duration>,
    /// Where there is no `deadline`: while it starts, nothing computes.
    start_deadline: Option<Duration>,
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The host's answer.
    pub reply: DeviceGetPropsReply,
    /// Whether `mmap_support` was answered, as it is since ggml 0.19.
    pub tells_mmap_support: bool,
}

/// What only one command at a time may use.
#[derive(Debug)]
struct Channel {
    reply: Blob,
    data: Blob,
    command: Box<[u8]>,
    answer: Box<[u8]>,
}

#[derive(Debug, Default)]
struct Counters {
    calls: AtomicU64,
    bytes: AtomicU64,
    graph_computes: AtomicU64,
}

/// What a session has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Commands answered, handshake and load included.
    pub calls: u64,
    /// Bytes of commands, of replies, and of data and graphs moved through shared memory for them.
    pub bytes: u64,
    /// Graphs sent to be computed.
    pub graph_computes: u64,
}

impl Session {
    /// Opens a context on the first host that answers, by the ways that the environment and this machine offer.
    ///
    /// # Errors
    /// [`SessionError::Link`] without any way, [`SessionError::NoAnswer`] when nobody shakes hands on a render node, and
    /// as [`Session::open`].
    pub fn connect() -> Result<Self, SessionError> {
        let mut session = Self::first(link::routes()?)?;
        session.deadline = deadline(std::env::var_os(TIMEOUT_VARIABLE))?;
        session.load_library()?;
        session.start(Self::extend)?;
        Ok(session)
    }

    /// The first of the routes on which somebody shakes hands.
    pub(crate) fn first(routes: Vec<Route>) -> Result<Self, SessionError> {
        let mut silent = Vec::new();
        for route in routes {
            let name = route.name().map(str::to_owned);
            match (route.open().map_err(SessionError::from).and_then(Self::greet), name) {
                (Ok(session), _) => return Ok(session),
                (Err(error), None) => return Err(error),
                (Err(error), Some(name)) => silent.push(format!("{name}: {error}")),
            }
        }
        Err(SessionError::NoAnswer(silent.join("; ")))
    }

    /// Opens a context on the host behind `link`: makes the shared blobs, shakes hands, has the plugin loaded.
    ///
    /// # Errors
    /// [`SessionError::Handshake`], [`SessionError::LoadLibrary`], or the link's failure; each is one line with the fix.
    pub fn open(link: Box<dyn Link>) -> Result<Self, SessionError> {
        let mut session = Self::greet(link)?;
        session.load_library()?;
        session.start(Self::extend)?;
        Ok(session)
    }

    fn greet(link: Box<dyn Link>) -> Result<Self, SessionError> {
        let channel = Channel {
            reply: link.create_blob(REPLY_BLOB_SIZE)?,
            data: link.create_blob(DATA_BLOB_SIZE)?,
            command: vec![0; COMMAND_CAPACITY as usize].into(),
            answer: vec![0; WHOLE_REPLY].into(),
        };
        let session = Self {
            channel: Mutex::new(channel),
            liveness: None,
            link,
            process: Process::current(),
            lost: OnceLock::new(),
            counters: Counters::default(),
            host_version: OnceLock::new(),
            features: None,
            deadline: None,
            start_deadline: None,
        };
        session.handshake()?;
        Ok(session)
    }

    /// The transport's name: `socket` or `virtgpu`.
    pub fn transport(&self) -> &'static str {
        self.link.transport()
    }

    /// Major and minor number of the protocol that the host told in the handshake. They are the renderer's, not the
    /// plugin's, so nothing follows from them.
    pub fn host_version(&self) -> (u32, u32) {
        self.host_version.get().copied().unwrap_or_default()
    }

    /// What the session has done so far.
    pub fn statistics(&self) -> Statistics {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Statistics {
            calls: read(&self.counters.calls),
            bytes: read(&self.counters.bytes),
            graph_computes: read(&self.counters.graph_computes),
        }
    }

    /// Whether the session can no longer be used here: the host is lost, or this process is a fork of the one that opened it.
    pub fn is_lost(&self) -> bool {
        self.check().is_err()
    }

    /// Whether this process opened it.
    pub fn is_ours(&self) -> bool {
        self.process.is_current()
    }

    /// Fails where [`Session::is_lost`] says true.
    ///
    /// # Errors
    /// [`SessionError::Forked`], [`SessionError::Lost`].
    pub fn check(&self) -> Result<(), SessionError> {
        // First: a fork may have copied the session while another thread was changing it.
        if !self.is_ours() {
            return Err(SessionError::Forked(self.process));
        }
        self.lost.get().map_or(Ok(()), |reason| Err(SessionError::Lost(reason.clone())))
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// [`SessionError::Lost`] when the host is gone, [`SessionError::Refused`] with the handler's code, and so on.
    pub fn call<R: Request>(&self, request: &R) -> Result<R::Reply, SessionError> {
        self.call_on(&mut *self.channel()?, request)
    }

    /// Asks what the device can do.
    ///
    /// Hosts of protocol 0.1 leave `mmap_support` unanswered: it is then true.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn properties(&self) -> Result<Properties, SessionError> {
        let mut channel = self.channel()?;
        // What the host does not write reads as true, not as the rest of an older reply.
        channel.reply.write(NOTIFICATION_SIZE, &[UNANSWERED; 20])?;
        let reply = self.call_on(&mut channel, &DeviceGetPropsRequest {})?;
        let mut last = [0; 4];
        channel.reply.read(NOTIFICATION_SIZE + 16, &mut last)?;
        Ok(Properties { reply, tells_mmap_support: last != [UNANSWERED; 4] })
    }

    /// Asks what a program needs before it can use the session. A host that does not answer is lost here, also one that gives no sign of life.
    ///
    /// # Errors
    /// Those of `ask`.
    pub(crate) fn start<T>(
        &mut self,
        ask: impl FnOnce(&mut Self) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        self.start_within(LOAD_LIBRARY_DEADLINE, ask)
    }

    fn start_within<T>(
        &mut self,
        deadline: Duration,
        ask: impl FnOnce(&mut Self) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        self.start_deadline = Some(deadline);
        let answer = ask(self);
        self.start_deadline = None;
        answer
    }

    fn handshake(&self) -> Result<(), SessionError> {
        let mut channel = self.channel()?;
        let answer =
            self.exchange(&mut channel, CommandType::Handshake, 0, Some(HANDSHAKE_DEADLINE), |arguments| {
                // Two words always fit.
                let _ = arguments.u32(PROTOCOL_MAJOR).and_then(|()| arguments.u32(PROTOCOL_MINOR));
                Ok(())
            })?;
        if answer != HANDSHAKE_MAGIC {
            return Err(SessionError::Handshake { found: answer });
        }
        let mut version = [0; 8];
        channel.reply.read(NOTIFICATION_SIZE, &mut version)?;
        let mut decoder = Decoder::new(&version);
        if let (Ok(major), Ok(minor)) = (decoder.u32(), decoder.u32()) {
            let _ = self.host_version.set((major, minor));
        }
        Ok(())
    }

    fn load_library(&self) -> Result<(), SessionError> {
        let mut channel = self.channel()?;
        let deadline = Some(LOAD_LIBRARY_DEADLINE);
        match self.exchange(&mut channel, CommandType::LoadLibrary, 0, deadline, |_| Ok(()))? {
            0 => Ok(()),
            code => Err(SessionError::LoadLibrary(LoadFailure(code))),
        }
    }

    /// Takes the turn; a lost host fails at once.
    fn channel(&self) -> Result<MutexGuard<'_, Channel>, SessionError> {
        // Before the lock too: in a fork its holder may be a thread that is not there.
        self.check()?;
        // Whatever a panicking thread left there is overwritten by the next command.
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        Ok(channel)
    }

    fn call_on<R: Request>(&self, channel: &mut Channel, request: &R) -> Result<R::Reply, SessionError> {
        self.try_call_on(channel, request).inspect_err(|failed| {
            // What carries the commands has failed: so would every later one.
            if matches!(failed, SessionError::Transport { .. }) {
                let _ = self.lost.set(failed.to_string());
            }
        })
    }

    /// As [`Session::call_on`], for a command that the host may not even carry.
    fn try_call_on<R: Request>(&self, channel: &mut Channel, request: &R) -> Result<R::Reply, SessionError> {
        let command = R::COMMAND;
        if self.has(FEATURE_REASONS) {
            // A host that has no reason to tell leaves the page as it is.
            channel.reply.write(NOTIFICATION_SIZE, &[0; 8])?;
        }
        let answer = self.exchange(
            channel,
            CommandType::Forward,
            command.number(),
            self.deadline.or(self.start_deadline),
            |arguments| request.encode(arguments).map_err(|source| SessionError::Encode { command, source }),
        )?;
        match answer.checked_sub(FORWARD_BASE) {
            Some(0) => {}
            Some(code) => {
                let reason = self.has(FEATURE_REASONS).then(|| channel.reason()).flatten();
                return Err(SessionError::Refused { command, code, reason });
            }
            None => return Err(SessionError::Transport { command, code: answer }),
        }
        let (reply, taken) = channel.reply::<R::Reply>(command)?;
        self.count_bytes(taken);
        Ok(reply)
    }

    /// Sends one command and waits for the answer's code; the reply then lies in the reply blob.
    fn exchange(
        &self,
        channel: &mut Channel,
        type_: CommandType,
        flags: u32,
        deadline: Option<Duration>,
        encode: impl FnOnce(&mut Encoder<'_>) -> Result<(), SessionError>,
    ) -> Result<u32, SessionError> {
        let Channel { reply, command, .. } = channel;
        let (header, arguments) = command.split_at_mut(HEADER_SIZE);
        header.copy_from_slice(
            &CommandHeader {
                type_: type_.number() + self.link.command_type_offset(),
                flags,
                reply_res_id: reply.res_id(),
            }
            .to_bytes(),
        );
        let mut arguments = Encoder::new(arguments);
        encode(&mut arguments)?;
        let len = HEADER_SIZE + arguments.len();
        reply.store_word(0, 0);
        self.link
            .submit(&command[..len])
            .and_then(|()| wait::until(&*self.link, deadline, || reply.load_word(0) != 0))
            .map_err(|error| self.link_failed(error))?;
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        self.count_bytes(len);
        Ok(reply.load_word(0).wrapping_sub(1))
    }

    /// Tells a failure of one command from the end of the host.
    fn link_failed(&self, error: LinkError) -> SessionError {
        match error {
            LinkError::Command { .. } | LinkError::Bounds { .. } | LinkError::Refused { .. } => error.into(),
            // A late answer would be taken for that of a later command: a timeout is final too.
            fatal => SessionError::Lost(self.lost.get_or_init(|| fatal.to_string()).clone()),
        }
    }

    fn count_bytes(&self, bytes: usize) {
        self.counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The reply to a refused command.
struct Reason(String);

impl Wire for Reason {
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
        encoder.string(&self.0)
    }

    fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        decoder.string().map(Self)
    }
}

fn deadline(setting: Option<OsString>) -> Result<Option<Duration>, SessionError> {
    match setting.filter(|setting| !setting.is_empty()) {
        None => Ok(None),
        Some(setting) => match setting.to_str().map(str::parse) {
            Some(Ok(millis @ 1..)) => Ok(Some(Duration::from_millis(millis))),
            _ => Err(SessionError::Timeout(setting)),
        },
    }
}

impl Channel {
    /// Why the host refuses a command, on one line of bounded length, if it says.
    fn reason(&mut self) -> Option<String> {
        let (text, _) = self.reply_within::<Reason>(SHORT_REPLY + REASON_BYTES as usize).ok()?.ok()?;
        let text = plain(&text.0, REASON_BYTES as usize);
        (!text.is_empty()).then_some(text)
    }

    /// Reads the reply and says how many bytes it took. What is decoded is a private copy: the host may write on.
    fn reply<T: Wire>(&mut self, command: Command) -> Result<(T, usize), SessionError> {
        match self.reply_within(SHORT_REPLY)? {
            Err(DecodeError::Truncated { .. }) => self.reply_within(WHOLE_REPLY)?,
            other => other,
        }
        .map_err(|source| SessionError::Decode { command, source })
    }

    #[allow(clippy::type_complexity)]
    fn reply_within<T: Wire>(&mut self, len: usize) -> Result<Result<(T, usize), DecodeError>, LinkError> {
        let answer = &mut self.answer[..len];
        self.reply.read(NOTIFICATION_SIZE, answer)?;
        let mut decoder = Decoder::new(answer);
        Ok(T::decode(&mut decoder).map(|reply| (reply, len - decoder.left())))
    }
}
