//! Clients that have connected and have no worker yet: who is next.
//!
//! A worker costs a process, so a client that has hung up gets none, and peers take turns: however many connections one process makes,
//! another's first one is next.
#![forbid(unsafe_code)]

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};

/// The most clients of one peer that wait.
pub(crate) const MAX_PER_PEER: usize = 64;
/// The most clients that wait.
pub(crate) const MAX_WAITING: usize = 256;

/// Who connected, as the kernel tells; a process of another PID namespace has the number 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Peer {
    /// Its user.
    pub(crate) user: u32,
    /// Its process id.
    pub(crate) process: i32,
}

/// The clients that wait, each peer's in their order.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    peers: VecDeque<(Peer, VecDeque<T>)>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { peers: VecDeque::new() }
    }
}

impl<T: AsFd> Waiting<T> {
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.peers.iter().map(|(_, clients)| clients.len()).sum()
    }

    /// Puts a client behind the others of its peer; false, and the client is dropped, when too many of them wait.
    pub(crate) fn push(&mut self, peer: Peer, client: T) -> bool {
        let Some((_, clients)) = self.peers.iter_mut().find(|(other, _)| *other == peer) else {
            self.peers.push_back((peer, VecDeque::from([client])));
            return true;
        };
        if clients.len() >= MAX_PER_PEER {
            clients.retain(|client| !has_hung_up(client.as_fd()));
        }
        let room = clients.len() < MAX_PER_PEER;
        if room {
            clients.push_back(client);
        }
        room
    }

    /// The next client that is still there, of the next peer that `may_start` one; that peer's next turn comes after all others'.
    /// `gone` is told how many were not there any more.
    pub(crate) fn next(&mut self, may_start: impl Fn(Peer) -> bool, gone: &mut u64) -> Option<(Peer, T)> {
        for _ in 0..self.peers.len() {
            let (peer, mut clients) = self.peers.pop_front()?;
            if !may_start(peer) {
                self.peers.push_back((peer, clients));
                continue;
            }
            let mut found = None;
            while let Some(client) = clients.pop_front() {
                if !has_hung_up(client.as_fd()) {
                    found = Some(client);
                    break;
                }
                *gone += 1;
            }
            if !clients.is_empty() {
                self.peers.push_back((peer, clients));
            }
            if let Some(client) = found {
                return Some((peer, client));
            }
        }
        None
    }
}

/// Whether the other end of a socket is closed.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    // Asking for nothing: a hang-up is always told. An error is told by whoever uses the socket.
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    use std::os::fd::OwnedFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    fn peer(process: i32) -> Peer {
        Peer { user: 1, process }
    }

    #[test]
    fn s28_peers_take_turns_and_whoever_left_has_none() {
        let mut waiting = Waiting::default();
        let mut far = Vec::new();
        for _ in 0..10 {
            let (near, client) = pair();
            far.push(near);
            assert!(waiting.push(peer(1), client));
        }
        let (_newcomer, client) = pair();
        assert!(waiting.push(peer(2), client));
        let mut gone = 0;
        assert_eq!(waiting.next(|_| true, &mut gone).unwrap().0, peer(1));
        assert_eq!(waiting.next(|_| true, &mut gone).unwrap().0, peer(2), "a newcomer has the second turn");
        // The first is served; five of the other nine leave.
        far.drain(1..6);
        assert_eq!(waiting.next(|_| true, &mut gone).unwrap().0, peer(1));
        assert_eq!((gone, waiting.len()), (5, 3));
        assert!(waiting.next(|peer| peer.process != 1, &mut gone).is_none());
        assert_eq!(waiting.len(), 3);
    }

    #[test]
    fn s28_a_peer_s_queue_is_bounded_and_those_who_left_make_room() {
        let mut waiting = Waiting::default();
        let mut far = Vec::new();
        for number in 0..=MAX_PER_PEER {
            let (near, client) = pair();
            far.push(near);
            assert_eq!(waiting.push(peer(1), client), number < MAX_PER_PEER);
        }
        let (_near, client) = pair();
        far.truncate(10);
        assert!(waiting.push(peer(1), client));
        assert_eq!(waiting.len(), 11);
    }
}
