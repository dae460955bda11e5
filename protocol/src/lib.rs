//! The APIR wire: commands, codec, tensor records, graph blobs and socket frames.
