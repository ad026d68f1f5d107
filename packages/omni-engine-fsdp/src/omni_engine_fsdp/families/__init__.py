"""Model families, one file each: Denoiser, Conditioner and Codec of one kind of pipeline."""
