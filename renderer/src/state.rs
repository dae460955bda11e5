//! What a context's callbacks reach: the plugin calls them with nothing but a context id.
#![forbid(unsafe_code)]

use crate::blob::Blob;
use crate::log;
use crate::plugin::Plugin;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// The key under which the plugin finds the protocol that the guest's library speaks, `MAJOR.MINOR`.
const GUEST_PROTOCOL: &CStr = c"apir.guest_protocol";

static CONTEXTS: RwLock<BTreeMap<u32, Arc<State>>> = RwLock::new(BTreeMap::new());

/// The part of a context that callbacks see, from whatever thread.
#[derive(Debug)]
pub(crate) struct State {
    id: u32,
    // Never changed, so that the strings stay put for the context's life.
    config: BTreeMap<CString, CString>,
    // Set once, for the same reason.
    guest_protocol: OnceLock<CString>,
    blobs: Mutex<HashMap<u32, Arc<Blob>>>,
    bad_lookup: AtomicBool,
    plugin: OnceLock<Plugin>,
}

impl State {
    /// Enters a context in the process's table; `None` when the id is taken.
    pub(crate) fn register(id: u32, config: BTreeMap<CString, CString>) -> Option<Arc<Self>> {
        let mut contexts = CONTEXTS.write().unwrap_or_else(PoisonError::into_inner);
        if contexts.contains_key(&id) {
            return None;
        }
        let state = Arc::new(Self {
            id,
            config,
            guest_protocol: OnceLock::new(),
            blobs: Mutex::default(),
            bad_lookup: AtomicBool::new(false),
            plugin: OnceLock::new(),
        });
        contexts.insert(id, state.clone());
        Some(state)
    }

    /// Takes the context out of the table: callbacks find nothing from now on.
    pub(crate) fn unregister(&self) {
        CONTEXTS.write().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }

    /// The context with this id.
    pub(crate) fn find(id: u32) -> Option<Arc<Self>> {
        CONTEXTS.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Its id.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// The plugin has started for this context.
    pub(crate) fn set_plugin(&self, plugin: Plugin) {
        // A context loads its library once.
        let _ = self.plugin.set(plugin);
    }

    /// Ends the context's computation, from any thread, where its plugin can.
    pub(crate) fn stop_computation(&self) {
        if let Some(plugin) = self.plugin.get() {
            plugin.stop(self.id);
        }
    }

    /// A configured string.
    pub(crate) fn config(&self, key: &CStr) -> Option<&CStr> {
        let text = if key == GUEST_PROTOCOL { self.guest_protocol.get() } else { self.config.get(key) };
        text.map(CString::as_c_str)
    }

    /// Keeps the protocol of the guest's first handshake for the plugin.
    pub(crate) fn set_guest_protocol(&self, major: u32, minor: u32) {
        if let Ok(text) = CString::new(format!("{major}.{minor}")) {
            // A later handshake changes nothing: the plugin may have the first one's text.
            let _ = self.guest_protocol.set(text);
        }
    }

    /// A blob.
    pub(crate) fn blob(&self, res_id: u32) -> Option<Arc<Blob>> {
        self.lock_blobs().get(&res_id).cloned()
    }

    /// A blob for the plugin. An unknown id ends the context after the command, as in virglrenderer.
    pub(crate) fn look_up(&self, res_id: u32) -> Option<Arc<Blob>> {
        let blob = self.blob(res_id);
        if blob.is_none() {
            self.bad_lookup.store(true, Ordering::Relaxed);
        }
        blob
    }

    /// Whether the plugin has asked for a blob that does not exist.
    pub(crate) fn had_bad_lookup(&self) -> bool {
        self.bad_lookup.load(Ordering::Relaxed)
    }

    /// Adds a blob.
    pub(crate) fn add_blob(&self, res_id: u32, blob: Blob) {
        self.lock_blobs().insert(res_id, Arc::new(blob));
    }

    /// Removes a blob; false when there is none.
    pub(crate) fn remove_blob(&self, res_id: u32) -> bool {
        self.lock_blobs().remove(&res_id).is_some()
    }

    /// Logs what a guest did wrong, at a bounded rate.
    pub(crate) fn warn(&self, line: fmt::Arguments<'_>) {
        log::warn(format_args!("context {}: {line}", self.id));
    }

    fn lock_blobs(&self) -> MutexGuard<'_, HashMap<u32, Arc<Blob>>> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
