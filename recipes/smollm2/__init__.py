"""SmolLM2-135M as a model to unlearn: conversion, articles learned by heart, target and retrained models."""
