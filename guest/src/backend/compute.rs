//! The backend: one stream of graphs to the device. Every graph is done when its call returns.

use super::attachment::Attachment;
use super::device::Device;
use super::{guard, log, registry};
use crate::graph::GraphWriter;
use apir_ggml::{GraphRef, Status, abi};
use std::ffi::{c_char, c_int};
use std::sync::{Mutex, PoisonError};

/// Names this implementation; ggml compares the bytes.
static GUID: abi::Guid = *b"apir.ggml.virtgp";

#[derive(Debug)]
struct Stream {
    device: &'static Device,
    attachment: &'static Attachment,
    writer: Mutex<GraphWriter>,
}

/// Makes a backend on a device, for the process that calls.
pub(super) fn make(device: &'static Device) -> *mut abi::Backend {
    let stream = Box::new(Stream { device, attachment: device.attached(), writer: Mutex::default() });
    Box::into_raw(Box::new(abi::Backend {
        guid: (&raw const GUID).cast_mut(),
        iface: IFACE,
        device: device.as_ptr(),
        context: Box::into_raw(stream).cast(),
    }))
}

impl Stream {
    fn compute(&self, graph: GraphRef<'_>) -> Status {
        let attachment = self.attachment;
        // Before the lock below, which a fork may have copied while it was held.
        if let Err(error) = attachment.session.check() {
            attachment.tell("cannot compute a graph", &error);
            return Status::Failed;
        }
        if attachment.take_failed() {
            log::error(format_args!("a graph is not computed: an earlier transfer failed"));
            return Status::Failed;
        }
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let written = writer.write(
            graph,
            &attachment.numbers,
            |node| self.device.is_view(node),
            |tensor| self.device.locate(attachment, tensor),
        );
        let bytes = match written {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Status::Success,
            Err(error) => {
                attachment.tell("cannot compute a graph", &error);
                return Status::Failed;
            }
        };
        match attachment.session.graph_compute(bytes) {
            Ok(number) => Status::from_number(number),
            Err(error) => {
                attachment.tell("cannot compute a graph", &error);
                Status::Failed
            }
        }
    }
}

const IFACE: abi::BackendIface = abi::BackendIface {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: None,
    synchronize: Some(synchronize),
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

/// The stream behind ggml's pointer.
///
/// # Safety
/// `backend` was made by [`make`] and is not freed while the reference is used.
unsafe fn of<'a>(backend: *mut abi::Backend) -> &'a Stream {
    // SAFETY: the context is the stream that was boxed with it.
    unsafe { &*(*backend).context.cast::<Stream>() }
}

unsafe extern "C" fn get_name(backend: *mut abi::Backend) -> *const c_char {
    // SAFETY: ggml calls with a backend that has this function.
    unsafe { of(backend) }.device.name.as_ptr()
}

unsafe extern "C" fn free(backend: *mut abi::Backend) {
    guard("free", (), || {
        // SAFETY: ggml frees a backend once, and it and its stream were boxed in `make`.
        let stream = unsafe { Box::from_raw(Box::from_raw(backend).context.cast::<Stream>()) };
        registry::write_statistics(stream.device, stream.attachment);
    });
}

/// Nothing is ever in flight.
unsafe extern "C" fn synchronize(_backend: *mut abi::Backend) {}

unsafe extern "C" fn graph_compute(backend: *mut abi::Backend, graph: *mut abi::CGraph) -> c_int {
    let status = guard("graph_compute", Status::Failed, || {
        // SAFETY: ggml calls with a backend that has this function.
        let stream = unsafe { of(backend) };
        // SAFETY: ggml gives a valid graph, and nobody changes it or its tensors during the call.
        let graph = unsafe { GraphRef::from_ptr(graph, &stream.device.layout) };
        graph.map_or(Status::Failed, |graph| stream.compute(graph))
    });
    status.number()
}
