//! The resources that a VMM has made, and whose they are.
#![forbid(unsafe_code)]

use super::Refusal;
use crate::blob::{self, BlobBytes, TakenBytes};
use memmap2::MmapRaw;
use nix::sys::resource::{Resource as Limit, getrlimit};
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

/// A scatter list of guest memory: the VMM's pointer and count, kept to be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Iov {
    /// The address of the VMM's array.
    pub(crate) address: usize,
    /// Its entries.
    pub(crate) count: u32,
}

/// Width, height and the like, as the VMM told them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Image {
    /// virgl's number of the format.
    pub(crate) format: u32,
    /// In pixels.
    pub(crate) width: u32,
    /// In pixels.
    pub(crate) height: u32,
    /// In pixels.
    pub(crate) depth: u32,
    /// As in the call that made it.
    pub(crate) flags: u32,
}

/// A blob's memory.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    /// Its memfd.
    pub(crate) file: Arc<File>,
    /// In bytes, whole pages.
    pub(crate) size: u64,
    /// None for a blob of the real library's.
    pub(crate) _taken: Option<Arc<TakenBytes>>,
}

/// A resource.
#[derive(Debug)]
pub(crate) enum Resource {
    /// The real library's.
    Chain {
        /// Whether it is a blob, which may be exported.
        blob: bool,
    },
    /// Ours, shared with a worker.
    Blob {
        /// Its memory.
        memory: Memory,
        /// Where the VMM has it mapped.
        mapping: Option<MmapRaw>,
    },
    /// One of the guest's own memory, or a picture, where there is no real library. The guest's console makes pictures; nobody
    /// here draws them, so they have no pixels.
    Inert {
        /// What the VMM told of it.
        image: Image,
        /// The guest's memory behind it.
        iov: Option<Iov>,
    },
}

/// All resources by their ids.
#[derive(Debug)]
pub(crate) struct Resources {
    table: HashMap<u32, Resource>,
    blobs: usize,
    max_blobs: usize,
}

impl Resources {
    pub(crate) fn new() -> Self {
        // Each blob holds a descriptor, and the VMM needs some too.
        let limit = getrlimit(Limit::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        Self { table: HashMap::new(), blobs: 0, max_blobs: usize::try_from(limit / 2).unwrap_or(usize::MAX) }
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Resource> {
        self.table.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut Resource> {
        self.table.get_mut(&id)
    }

    /// That a resource of this id may be made.
    pub(crate) fn check_free(&self, id: u32) -> Result<(), Refusal> {
        if id == 0 || self.table.contains_key(&id) { Err(Refusal::ResourceId { id }) } else { Ok(()) }
    }

    /// Enters a resource whose id is free.
    pub(crate) fn insert(&mut self, id: u32, resource: Resource) {
        if matches!(resource, Resource::Blob { .. }) {
            self.blobs += 1;
        }
        self.table.insert(id, resource);
    }

    /// Makes a blob of ours, whose bytes are taken from a context's.
    pub(crate) fn create_blob(&mut self, id: u32, size: u64, bytes: &BlobBytes) -> Result<Memory, Refusal> {
        self.check_free(id)?;
        if self.blobs >= self.max_blobs {
            return Err(Refusal::TooManyBlobs { limit: self.max_blobs });
        }
        let (file, size, taken) =
            blob::create_memory(size, bytes).map_err(|cause| Refusal::Blob { size, cause })?;
        let memory = Memory { file: Arc::new(file), size, _taken: Some(Arc::new(taken)) };
        self.insert(id, Resource::Blob { memory: memory.clone(), mapping: None });
        Ok(memory)
    }

    pub(crate) fn remove(&mut self, id: u32) -> Option<Resource> {
        let resource = self.table.remove(&id)?;
        if matches!(resource, Resource::Blob { .. }) {
            self.blobs -= 1;
        }
        Some(resource)
    }

    pub(crate) fn clear(&mut self) {
        self.table.clear();
        self.blobs = 0;
    }
}
