//! The decoder: any bytes as the request and as the reply of any command.
#![forbid(unsafe_code)]

use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::command::Command;
use apir_protocol::header::CommandHeader;
use apir_protocol::messages::*;
use apir_protocol::{Request, Wire};

/// Decodes `input`, whose first byte chooses the command, as its request and as its reply.
pub fn run(input: &[u8]) {
    let Some((first, bytes)) = input.split_first() else { return };
    let _ = CommandHeader::from_bytes(bytes);
    let command = Command::ALL[usize::from(*first) % Command::ALL.len()];
    match command {
        Command::DeviceGetDeviceCount => both::<DeviceGetDeviceCountRequest>(bytes),
        Command::DeviceGetCount => both::<DeviceGetCountRequest>(bytes),
        Command::DeviceGetName => both::<DeviceGetNameRequest>(bytes),
        Command::DeviceGetDescription => both::<DeviceGetDescriptionRequest>(bytes),
        Command::DeviceGetType => both::<DeviceGetTypeRequest>(bytes),
        Command::DeviceGetMemory => both::<DeviceGetMemoryRequest>(bytes),
        Command::DeviceSupportsOp => both::<DeviceSupportsOpRequest>(bytes),
        Command::DeviceGetBufferType => both::<DeviceGetBufferTypeRequest>(bytes),
        Command::DeviceGetProps => both::<DeviceGetPropsRequest>(bytes),
        Command::DeviceBufferFromPtr => both::<DeviceBufferFromPtrRequest>(bytes),
        Command::BufferTypeGetName => both::<BufferTypeGetNameRequest>(bytes),
        Command::BufferTypeGetAlignment => both::<BufferTypeGetAlignmentRequest>(bytes),
        Command::BufferTypeGetMaxSize => both::<BufferTypeGetMaxSizeRequest>(bytes),
        Command::BufferTypeIsHost => both::<BufferTypeIsHostRequest>(bytes),
        Command::BufferTypeAllocBuffer => both::<BufferTypeAllocBufferRequest>(bytes),
        Command::BufferTypeGetAllocSize => both::<BufferTypeGetAllocSizeRequest>(bytes),
        Command::BufferGetBase => both::<BufferGetBaseRequest>(bytes),
        Command::BufferSetTensor => both::<BufferSetTensorRequest>(bytes),
        Command::BufferGetTensor => both::<BufferGetTensorRequest>(bytes),
        Command::BufferCpyTensor => both::<BufferCpyTensorRequest>(bytes),
        Command::BufferClear => both::<BufferClearRequest>(bytes),
        Command::BufferFreeBuffer => both::<BufferFreeBufferRequest>(bytes),
        Command::BackendGraphCompute => both::<BackendGraphComputeRequest>(bytes),
        Command::Hello => both::<HelloRequest>(bytes),
        Command::Liveness => both::<LivenessRequest>(bytes),
        Command::Names => both::<NamesRequest>(bytes),
    }
}

fn both<R: Request>(bytes: &[u8]) {
    round_trip::<R>(bytes);
    round_trip::<R::Reply>(bytes);
}

/// What was decoded is encoded in no more bytes than its text may grow to, and decodes to itself.
fn round_trip<T: Wire>(bytes: &[u8]) {
    let mut decoder = Decoder::new(bytes);
    let Ok(value) = T::decode(&mut decoder) else { return };
    let taken = bytes.len() - decoder.left();
    assert!(
        taken.is_multiple_of(4) && decoder.left() <= bytes.len(),
        "{taken} of {} bytes taken",
        bytes.len()
    );
    // A byte that is no UTF-8 becomes three.
    let once = encode(&value, 3 * bytes.len() + 16);
    let mut decoder = Decoder::new(&once);
    let again =
        T::decode(&mut decoder).unwrap_or_else(|error| panic!("what was encoded is not decoded: {error}"));
    assert_eq!(decoder.left(), 0, "bytes behind what was encoded");
    assert_eq!(encode(&again, once.len()), once, "a second round changes the bytes");
}

fn encode<T: Wire>(value: &T, room: usize) -> Vec<u8> {
    let mut bytes = vec![0xa5; room];
    let mut encoder = Encoder::new(&mut bytes);
    value.encode(&mut encoder).unwrap_or_else(|error| panic!("what was decoded is not encoded: {error}"));
    let len = encoder.len();
    bytes.truncate(len);
    bytes
}
