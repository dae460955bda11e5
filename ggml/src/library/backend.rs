//! A stream of work on a device.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::load::Loaded;
use super::{Registry, string};
use crate::abi;
use crate::error::Error;
use crate::graph::Graph;
use crate::values::Status;

type GraphComputeFn = unsafe extern "C" fn(*mut abi::Backend, *mut abi::CGraph) -> c_int;
type SetThreadsFn = unsafe extern "C" fn(*mut abi::Backend, c_int);
/// `ggml_abort_callback`: whether to stop.
type AbortFn = unsafe extern "C" fn(*mut c_void) -> bool;
type SetAbortFn = unsafe extern "C" fn(*mut abi::Backend, AbortFn, *mut c_void);

/// Asks the flag that is the user data.
unsafe extern "C" fn is_stopped(stop: *mut c_void) -> bool {
    // SAFETY: `Backend::stop_by` gives a flag that the backend holds.
    unsafe { &*stop.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}

/// A backend: computes graphs one after another. Freed when dropped.
#[derive(Debug)]
pub struct Backend {
    loaded: Arc<Loaded>,
    raw: NonNull<abi::Backend>,
    graph_compute: GraphComputeFn,
    set_n_threads: Option<SetThreadsFn>,
    /// Kept while the backend may ask it.
    stop: Option<Arc<AtomicBool>>,
}

// SAFETY: a backend may be used by any thread, by one at a time.
unsafe impl Send for Backend {}

impl Backend {
    /// The backend at a pointer.
    ///
    /// # Safety
    ///
    /// `raw` is null or a backend of the library that nobody else frees.
    pub(super) unsafe fn from_raw(loaded: &Arc<Loaded>, raw: *mut abi::Backend) -> Result<Self, Error> {
        let raw = NonNull::new(raw).ok_or(Error::SlotNull { object: "device", slot: "init_backend" })?;
        // SAFETY: the caller says that it is a backend.
        let graph_compute = unsafe { (*raw.as_ptr()).iface.graph_compute }
            .ok_or(Error::SlotMissing { object: "backend", slot: "graph_compute" })?;
        let set = Registry::new(Arc::clone(loaded)).proc_address(c"ggml_backend_set_n_threads");
        // SAFETY: the function of this name has had this type in every supported version.
        let set_n_threads = set.map(|set| unsafe { mem::transmute::<NonNull<c_void>, SetThreadsFn>(set) });
        Ok(Self { loaded: Arc::clone(loaded), raw, graph_compute, set_n_threads, stop: None })
    }

    fn iface(&self) -> &abi::BackendIface {
        // SAFETY: the backend lives and its functions are not changed.
        unsafe { &(*self.raw.as_ptr()).iface }
    }

    /// Its name.
    pub fn name(&self) -> String {
        // SAFETY: the function is called with its own object and gives a C string.
        self.iface().get_name.map_or_else(String::new, |get| unsafe { string(get(self.raw.as_ptr())) })
    }

    /// Computes a graph. On an asynchronous backend the work may go on after the return: [`Backend::synchronize`] waits for it.
    pub fn graph_compute(&self, graph: &mut Graph) -> Status {
        // SAFETY: the function is called with its own object and a graph whose pointers all lead to the graph's own tensors and to buffers it
        // holds; `GgmlLibrary::open`'s caller answers for the operations.
        Status::from_number(unsafe { (self.graph_compute)(self.raw.as_ptr(), graph.as_mut_ptr()) })
    }

    /// Computes some nodes of a graph, given by their place among its nodes, as [`Backend::graph_compute`] does all.
    pub fn graph_compute_part(&self, graph: &mut Graph, nodes: Range<usize>) -> Status {
        let mut part = graph.part(nodes);
        // SAFETY: as for the whole graph, whose pointers the part has; it lives until the function returns, and backends keep tensors, no graphs.
        Status::from_number(unsafe { (self.graph_compute)(self.raw.as_ptr(), &raw mut part) })
    }

    /// Waits until all work is done.
    pub fn synchronize(&self) {
        if let Some(synchronize) = self.iface().synchronize {
            // SAFETY: the function is called with its own object.
            unsafe { synchronize(self.raw.as_ptr()) };
        }
    }

    /// Sets how many threads a computation uses; false when the backend has no such setting.
    pub fn set_n_threads(&self, threads: c_int) -> bool {
        let Some(set) = self.set_n_threads else { return false };
        // SAFETY: the function is called with a backend of its library.
        unsafe { set(self.raw.as_ptr(), threads) };
        true
    }

    /// Has computations end with [`Status::Aborted`] before their next node once `stop` is true; false when the backend cannot.
    pub fn stop_by(&mut self, stop: Arc<AtomicBool>) -> bool {
        let registry = Registry::new(Arc::clone(&self.loaded));
        let Some(set) = registry.proc_address(c"ggml_backend_set_abort_callback") else { return false };
        let flag = Arc::as_ptr(&stop).cast_mut().cast::<c_void>();
        // SAFETY: the function of this name has had this type in every supported version, and is called with a backend of its library; the
        // flag is held until the backend is freed or has another one.
        unsafe { mem::transmute::<NonNull<c_void>, SetAbortFn>(set)(self.raw.as_ptr(), is_stopped, flag) };
        self.stop = Some(stop);
        true
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.synchronize();
        if let Some(free) = self.iface().free {
            // SAFETY: the backend is ours, and nothing uses it afterwards.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}
