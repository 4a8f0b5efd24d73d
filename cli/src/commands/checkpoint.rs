//! `pilotlight checkpoint …`: the loader's tools, with progress and a document on request.

use std::path::Path;

use pilotlight_domain::Bandwidth;
use pilotlight_loader::bench::{self, BenchOptions, BenchReport};
use pilotlight_loader::convert::{self, ConvertOptions};
use pilotlight_loader::inspect::{self, Summary};
use pilotlight_loader::load::LoadOptions;
use pilotlight_loader::manifest::Source;
use pilotlight_loader::readers::ReaderKind;
use pilotlight_loader::{CancelFlag, verify};

use crate::args::CheckpointCommand;
use crate::failure::Failure;
use crate::output::{Format, Table, print};
use crate::progress::Progress;

/// Runs one to its end. Ctrl-C cancels: what is half done is taken away.
pub(crate) fn run(command: CheckpointCommand) -> Result<(), Failure> {
    let cancel = cancelled_by_signals()?;
    match command {
        CheckpointCommand::Convert { src, dest, output } => convert(&src, &dest, output.format, &cancel),
        CheckpointCommand::Inspect { path, output } => inspect(&path, output.format),
        CheckpointCommand::Verify { path, output } => verify(&path, output.format, &cancel),
        CheckpointCommand::Bench { path, raw, reader, output } => {
            bench(&path, raw, reader, output.format, &cancel)
        }
    }
}

fn cancelled_by_signals() -> Result<CancelFlag, Failure> {
    let cancel = CancelFlag::new();
    let raised = cancel.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            raised.cancel();
        }
    })?;
    Ok(cancel)
}

fn convert(src: &Path, dest: &Path, output: Format, cancel: &CancelFlag) -> Result<(), Failure> {
    let uri = src.canonicalize().map(|path| format!("file://{}", path.display())).ok();
    let options = ConvertOptions { source: Source { uri, ..Source::default() }, ..ConvertOptions::default() };
    let progress = Progress::new("convert", output.is_document());
    let converted = convert::convert(src, dest, &options, &|p| progress.set(p.done, p.total), cancel)?;
    progress.finish();
    if output.is_document() {
        return output.print(&converted);
    }
    let rate = Bandwidth::measured(converted.bytes, converted.elapsed);
    print(&format!(
        "{}: {} in {:.2} s ({rate}), verified\n{}\n",
        dest.display(),
        converted.bytes,
        converted.elapsed.as_secs_f64(),
        converted.digest
    ))?;
    if !converted.skipped.is_empty() {
        print(&format!("left out: {}\n", converted.skipped.join(", ")))?;
    }
    Ok(())
}

fn inspect(path: &Path, output: Format) -> Result<(), Failure> {
    let summary = inspect::inspect(path)?;
    if output.is_document() {
        return output.print(&summary);
    }
    print(&for_people(&summary, output == Format::Wide))
}

fn for_people(summary: &Summary, wide: bool) -> String {
    let mut text = format!(
        "{} checkpoint, {}, {:.1} M parameters, {} of tensors in {} file(s)\n",
        summary.format,
        summary.architecture,
        summary.parameters as f64 / 1e6,
        summary.tensor_bytes,
        summary.files.len()
    );
    if let Some(digest) = &summary.digest {
        text.push_str(&format!("{digest}\n"));
    }
    let dtypes: Vec<String> =
        summary.dtypes.iter().map(|(dtype, bytes)| format!("{dtype} {bytes}")).collect();
    text.push_str(&format!("{}\n\n", dtypes.join(", ")));
    let mut table = Table::new(["FILE", "SIZE", "DATA AT", "CHUNKS"]);
    for file in &summary.files {
        let cells =
            [file.name.clone(), file.bytes.to_string(), file.data_start.to_string(), file.chunks.to_string()];
        table.row(cells);
    }
    text.push_str(&table.render());
    if wide {
        let mut table = Table::new(["TENSOR", "DTYPE", "SHAPE", "FILE", "OFFSET"]);
        for tensor in &summary.tensors {
            table.row([
                tensor.name.clone(),
                tensor.dtype.to_string(),
                format!("{:?}", tensor.shape),
                tensor.file.clone(),
                tensor.offset.to_string(),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

fn verify(path: &Path, output: Format, cancel: &CancelFlag) -> Result<(), Failure> {
    let progress = Progress::new("verify", output.is_document());
    let verified = verify::verify(path, &LoadOptions::default(), &|p| progress.set(p.done, p.total), cancel)?;
    progress.finish();
    if let Some(first) = verified.damage.first() {
        let more = match verified.damage.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        return Err(Failure::new(format!("{} is damaged: {first}{more}", path.display()))
            .cure("get an undamaged copy, or convert it again from its source"));
    }
    if output.is_document() {
        return output.print(&verified);
    }
    let how = match verified.digest {
        Some(digest) => format!("every byte checked\n{digest}"),
        None => "its structure is sound; it has no checksums until it is converted".to_owned(),
    };
    let (files, tensors) = (verified.files, verified.tensors);
    print(&format!("{}: {files} file(s), {tensors} tensors, {}: {how}\n", path.display(), verified.bytes))
}

fn bench(
    path: &Path,
    raw: bool,
    reader: ReaderKind,
    output: Format,
    cancel: &CancelFlag,
) -> Result<(), Failure> {
    let options = BenchOptions { load: LoadOptions { reader, ..LoadOptions::default() }, raw };
    let report = bench::bench(path, &options, cancel)?;
    if output.is_document() {
        return output.print(&report);
    }
    print(&bench_for_people(&report))
}

fn bench_for_people(report: &BenchReport) -> String {
    let rate = |bytes_per_second: f64| format!("{:.2} GB/s", bytes_per_second / 1e9);
    let mut text = format!(
        "{} in {:.3} s: {} with {}, {} × {} in flight, {:.3} CPU-s per GB\n",
        report.bytes,
        report.seconds,
        rate(report.bytes_per_second),
        report.reader,
        report.depth,
        report.block_bytes,
        report.cpu_seconds / (report.bytes.get().max(1) as f64 / 1e9),
    );
    if let (Some(raw), Some(fraction)) = (report.raw_bytes_per_second, report.fraction) {
        text.push_str(&format!("best raw rate {}: the load came to {fraction:.2} of it\n", rate(raw)));
    }
    let said = |yes: bool, a: &'static str, b: &'static str| if yes { a } else { b };
    text.push_str(&format!(
        "{}, {}, {}; pool pages: {}\n",
        said(report.verified, "every chunk verified", "no checksums to verify: convert it first"),
        said(
            report.direct,
            "read with O_DIRECT",
            "this file system has no O_DIRECT: read through the page cache"
        ),
        said(report.cold, "from a cold page cache", "NOT cold: some pages stayed in the page cache"),
        report.pages
    ));
    text
}

#[cfg(test)]
mod tests {
    use pilotlight_domain::ByteCount;

    use super::*;

    #[test]
    fn a_bench_without_raw_says_only_what_was_measured() {
        let report = BenchReport {
            bytes: ByteCount::from_gib(1),
            seconds: 1.0,
            bytes_per_second: 1.07e9,
            raw_bytes_per_second: None,
            fraction: None,
            cpu_seconds: 0.1,
            reader: ReaderKind::Pread,
            block_bytes: ByteCount::from_mib(2),
            depth: 32,
            verified: true,
            direct: true,
            cold: false,
            pages: "4 KiB",
            passes: Vec::new(),
        };
        let text = bench_for_people(&report);
        assert!(text.contains("1.07 GB/s") && text.contains("NOT cold") && !text.contains("raw"), "{text}");
    }
}
