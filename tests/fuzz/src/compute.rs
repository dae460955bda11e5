//! Graphs of a guest, computed by the plugin with the real libggml-cpu.
#![forbid(unsafe_code)]

use crate::generate::{Case, SIZES};
use crate::graph::Graph;
use crate::guest::{Blob, Guest, Neighbour, whole};
use crate::mutate::{self, ToBytes};
use crate::threads::{PerCount, Threads};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::{BufferGetTensorRequest, BufferSetTensorRequest};
use arbitrary::Unstructured;
use std::cell::RefCell;
use std::sync::Arc;

/// First byte of an input that is a graph blob; the buffers are those of [`SIZES`], counted from 1.
pub const BLOB: u8 = 0;
/// First byte of an input that is a recipe: numbers for a random graph, then numbers for changes to it and to what its buffers hold.
pub const RECIPE: u8 = 1;

/// What an input asks for.
#[derive(Debug, Clone)]
pub enum Input {
    /// A graph blob, over buffers of noise.
    Blob(Vec<u8>),
    /// A graph, the contents of its buffers, and whether it is as it was made, so that it must be computed.
    Graph(Box<Case>, bool),
}

impl Input {
    /// The input that these bytes are.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        match bytes.split_first() {
            Some((&first, recipe)) if first % 2 == RECIPE => {
                let half = recipe.len() / 2;
                let mut case = Case::arbitrary(&mut Unstructured::new(&recipe[..half]));
                let made = case.clone();
                let mut changes = Unstructured::new(&recipe[half..]);
                mutate::graph(&mut case.graph, &mut changes);
                mutate::contents(&mut case.contents, &mut changes);
                let same = made.graph == case.graph && made.contents == case.contents;
                Self::Graph(Box::new(case), same)
            }
            Some((_, blob)) => Self::Blob(blob.to_vec()),
            None => Self::Blob(Vec::new()),
        }
    }

    /// An input that is this graph blob.
    #[must_use]
    pub fn blob(blob: &[u8]) -> Vec<u8> {
        [&[BLOB], blob].concat()
    }
}

/// A step of libFuzzer: over the graph of a blob, over the numbers of a recipe.
pub fn mutate(data: &mut [u8], (size, max_size): (usize, usize), seed: u32, to_bytes: ToBytes) -> usize {
    match data.first() {
        Some(&first) if size > 1 && first % 2 == BLOB => {
            1 + mutate::blob(&mut data[1..], (size - 1, max_size - 1), seed, to_bytes)
        }
        _ => to_bytes(data, size, max_size),
    }
}

/// A guest with the buffers of [`SIZES`], and its neighbour.
#[derive(Debug)]
pub struct Bench {
    guest: Guest,
    neighbour: Neighbour,
    handles: [BufferHandle; SIZES.len()],
    /// The memory of those buffers that the guest shares.
    shared: [Option<Arc<Blob>>; SIZES.len()],
    staging: (u32, Arc<Blob>),
}

impl Bench {
    /// Starts both; the guest shares the last buffer.
    #[must_use]
    pub fn start(threads: Threads) -> Self {
        Self::start_with(threads, [false, false, true])
    }

    /// Starts both; the guest shares these buffers.
    #[must_use]
    pub fn start_with(threads: Threads, shared: [bool; SIZES.len()]) -> Self {
        let mut guest = Guest::started(threads);
        let mut handles = [BufferHandle::default(); SIZES.len()];
        let shared = std::array::from_fn(|at| {
            let memory;
            (handles[at], memory) = match shared[at] {
                true => {
                    let (handle, blob) = guest.shared_buffer(SIZES[at]);
                    (handle, Some(blob))
                }
                false => (guest.buffer(SIZES[at]), None),
            };
            memory
        });
        let staging = guest.blob(&[0; SIZES[0]]);
        Self { guest, neighbour: Neighbour::start(), handles, shared, staging }
    }

    /// The guest.
    pub fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    /// The memory of a buffer that the guest shares.
    #[must_use]
    pub fn shared(&self, buffer: usize) -> Option<&Arc<Blob>> {
        self.shared.get(buffer)?.as_ref()
    }

    /// Puts the whole contents of the buffers.
    ///
    /// # Panics
    /// When the plugin refuses.
    pub fn fill(&mut self, contents: &[Vec<u8>; SIZES.len()]) {
        let (res_id, staging) = self.staging.clone();
        for ((buffer, shared), bytes) in self.handles.into_iter().zip(&self.shared).zip(contents) {
            if let Some(shared) = shared {
                shared.write(0, bytes);
                continue;
            }
            staging.write(0, bytes);
            let (tensor, size) = (whole(buffer, bytes.len()), bytes.len() as u64);
            let request = BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size };
            self.guest.call(&request).expect("a write of a whole buffer");
        }
    }

    /// The whole contents of the buffers.
    ///
    /// # Panics
    /// When the plugin refuses.
    pub fn contents(&mut self) -> [Vec<u8>; SIZES.len()] {
        let (res_id, staging) = self.staging.clone();
        let mut contents = SIZES.map(|_| Vec::new());
        for (at, buffer) in self.handles.into_iter().enumerate() {
            if let Some(shared) = &self.shared[at] {
                contents[at] = shared.read(SIZES[at]);
                continue;
            }
            let (tensor, size) = (whole(buffer, SIZES[at]), SIZES[at] as u64);
            let request = BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size };
            self.guest.call(&request).expect("a read of a whole buffer");
            contents[at] = staging.read(SIZES[at]);
        }
        contents
    }

    /// The bytes of a graph over these buffers.
    #[must_use]
    pub fn blob_of(&self, graph: &Graph) -> Vec<u8> {
        let mut graph = graph.clone();
        graph.resolve(&self.handles);
        graph.to_blob()
    }

    /// Computes a graph over these buffers.
    ///
    /// # Errors
    /// The code of a refusal.
    pub fn compute(&mut self, graph: &Graph) -> Result<i32, u32> {
        let blob = self.blob_of(graph);
        self.guest.compute(&blob)
    }

    /// Computes an input. Whatever it is, its guest and its neighbour live.
    ///
    /// # Panics
    /// When one does not, or an honest graph is refused.
    pub fn run(&mut self, input: &[u8]) {
        let computed = match Input::of(input) {
            Input::Graph(case, honest) => {
                self.fill(&case.contents);
                let computed = self.compute(&case.graph);
                assert!(!honest || computed == Ok(0), "an honest graph ended with {computed:?}");
                computed
            }
            Input::Blob(blob) => {
                self.fill(&SIZES.map(noise));
                match Graph::from_blob(&blob) {
                    Some(graph) => self.compute(&graph),
                    None => self.guest.compute(&blob),
                }
            }
        };
        // ggml's status: out of memory, failed, done, aborted.
        assert!(computed.is_err() || computed.is_ok_and(|status| (-2..=1).contains(&status)));
        self.check();
    }

    /// Fails unless the guest and its neighbour live.
    ///
    /// # Panics
    /// When one does not.
    pub fn check(&mut self) {
        self.guest.assert_alive();
        self.neighbour.check();
    }
}

/// Small numbers, so that indices made of them are good ones and bad ones.
fn noise(size: usize) -> Vec<u8> {
    (0..size).map(|at| if at % 4 == 0 { (at / 4 * 5 % 23) as u8 } else { 0 }).collect()
}

/// Runs an input in one of this process's benches.
pub fn run(input: &[u8]) {
    thread_local! { static BENCHES: RefCell<PerCount<Bench>> = RefCell::default(); }
    BENCHES.with_borrow_mut(|benches| benches.get(Threads::of(input), Bench::start).run(input));
}
